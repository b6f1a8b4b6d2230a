"""Commands that reach another server than the process does."""

import pytest

from streamer.commands.execute import Script, execute
from streamer.commands.wait import wait
from streamer.errors import SourceElsewhereError
from streamer.progress.scripts import ScriptSide
from streamer.target.connection import TargetAddress
from tests.support.comparing import Compare
from tests.support.postgres import Database
from tests.support.streamer import MakeStreamer

SECONDS = 60.0


@pytest.mark.parametrize("column", ["timeline = timeline + 1", "system_identifier = '7'"])
async def test_commands_refuse_a_server_from_which_the_process_does_not_stream(
    column: str, source: Database, target: Database, stream: MakeStreamer, compare: Compare
) -> None:
    """The bookkeeping names the server of the process."""
    for database in (source, target):
        database.execute("create table t (id int primary key)")
    async with stream("t: {initial: none}") as streamer:
        await streamer.caught_up(SECONDS)
        address = TargetAddress.parse(streamer.settings.target.url)
        assert await wait(address, streamer.mapping, SECONDS) is None
        assert (await compare(streamer))["t"].is_equal
        target.execute(f"update streamer.source set {column}")
        missing = await wait(address, streamer.mapping, 2.0)
        assert missing is not None
        assert "this command reached another server than `run`" in missing
        with pytest.raises(SourceElsewhereError):
            await compare(streamer)
        script = Script("s", "create table never (id int)", ScriptSide.SOURCE)
        sources = list(streamer.mapping.sources)
        with pytest.raises(SourceElsewhereError):
            await execute(address, sources, script, seconds=SECONDS, target_namespace="public")
        assert source.value("select to_regclass('never')") is None
        status = await streamer.status()
        assert status["own"]["error_code"] == "source_elsewhere"
        assert status["own"]["state"] == "at another server"
        assert (status["state"], status["error"]) == ("streaming", None)
