"""Commands in messages can be pasted, whatever names they contain."""

import shlex

from streamer.errors.command_lines import command


def test_every_name_is_one_word_of_the_shell() -> None:
    table, database, sid = "public.it's mine", "my shop; rm -rf", "$(eu)"
    line = command("resync", table, "--mode", "diff", database=database, sid=sid)
    assert shlex.split(line) == [
        *("streamer", "resync", table, "--database", database, "--sid", sid, "--mode", "diff"),
    ]
    assert command("quarantine list") == "streamer quarantine list"
