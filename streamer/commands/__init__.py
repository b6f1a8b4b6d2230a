"""The work of the commands, apart from reading their arguments."""
