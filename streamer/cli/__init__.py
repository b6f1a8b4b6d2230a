"""The command line: arguments in, exit code out.

Every command ends with 0 (done), 1 (what was asked about is not so), 2 (wrong usage or
configuration), 3 (a server cannot be reached or refuses) or 4 (an error that needs a person), and
says in one line on stderr what is wrong and what to do.

What only some commands need, and takes long to import, is imported by them: the others are what
scripts call often.
"""
