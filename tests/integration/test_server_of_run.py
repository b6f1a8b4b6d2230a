"""Commands that reach a different server than the process."""

import json
import zipfile
from pathlib import Path

import pytest

from streamer.bookkeeping.scripts import ScriptSide
from streamer.commands.doctor.bug_report import write_bundle
from streamer.commands.doctor.diagnosis import diagnose
from streamer.commands.execute_script import Script, execute
from streamer.commands.missing_indexes import missing_fk
from streamer.commands.tenants.tenant_drift import read_drift
from streamer.commands.wait import wait
from streamer.errors.error_classes import SourceElsewhereError
from streamer.mapping.scope import Scope
from streamer.target.connection import TargetAddress
from tests.support.comparing import Compare
from tests.support.postgres import Database
from tests.support.streamer import MakeStreamer

SECONDS = 60.0
ELSEWHERE = "this command reached another server than `run`"


@pytest.mark.parametrize("column", ["timeline = timeline + 1", "system_identifier = '7'"])
async def test_commands_refuse_a_server_from_which_the_process_does_not_stream(
    column: str,
    source: Database,
    target: Database,
    stream: MakeStreamer,
    compare: Compare,
    tmp_path: Path,
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
        assert ELSEWHERE in missing
        with pytest.raises(SourceElsewhereError):
            await compare(streamer)
        script = Script("s", "create table never (id int)", ScriptSide.SOURCE)
        sources = list(streamer.mapping.sources)
        with pytest.raises(SourceElsewhereError):
            await execute(address, sources, script, seconds=SECONDS, target_namespace="public")
        assert source.value("select to_regclass('never')") is None
        with pytest.raises(SourceElsewhereError):
            await missing_fk(address, streamer.mapping, "public", apply=False)
        drift = await read_drift(address, streamer.mapping, Scope())
        assert ELSEWHERE in drift.unreachable["shop"]
        bundle = tmp_path / "bundle.zip"
        diagnosis = await diagnose(streamer.settings, streamer.mapping)
        await write_bundle(bundle, streamer.settings, streamer.mapping, diagnosis)
        (slots,) = json.loads(zipfile.ZipFile(bundle).read("streamer/slots.json"))
        assert ELSEWHERE in slots["slots"]["error"]
        status = await streamer.status()
        assert status["own"]["error_code"] == "source_elsewhere"
        assert status["own"]["state"] == "at another server"
        assert (status["state"], status["error"]) == ("streaming", None)
