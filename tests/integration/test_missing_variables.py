"""A source that lacks a variable or a password is in error; the remaining sources run."""

from pathlib import Path

import pytest

from streamer.commands.check.check import check
from tests.support.postgres import Database
from tests.support.streamer import Streamer

SECONDS = 60.0
CONFIG = """\
target: {{url: "{target}"}}
http: {{listen: ""}}
spool: {{directory: "{spool}"}}
sources:
- database: shop
  urls:
  - {{url: "{source}", sid: eu}}
  - {{url: "{other}", sid: us}}
  tables: {{t: {{initial: none}}}}
"""


async def test_a_source_lacks_a_variable_and_gets_it(
    source: Database, target: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both urls lead to a database under two slots, enough to see the streaming sources."""
    source.execute("create table t (id int primary key)")
    target.execute("create table t (sid text, id int, primary key (sid, id))")
    path = tmp_path / "config.yaml"

    def configure(other: str) -> None:
        path.write_text(
            CONFIG.format(
                source=source.url, target=target.url, other=other, spool=tmp_path / "spool"
            )
        )

    def error_of_other() -> str:
        return next(
            (r["error"] for r in streamer.engine.readiness() if r.get("source") == "shop:us"), ""
        )

    async def arrives(number: int, *sids: str) -> None:
        source.execute(f"insert into t values ({number})")

        async def is_there() -> bool:
            found = target.execute(f"select sid from t where id = {number} order by 1")
            return found == [(sid,) for sid in sids]

        await streamer.eventually(is_there, SECONDS)

    async def is_said(*words: str) -> None:
        async def is_so() -> bool:
            return all(word in error_of_other() for word in words)

        await streamer.eventually(is_so, SECONDS)

    configure("${OTHER_URL}")
    streamer = Streamer(path)
    streamer.start()
    try:
        await is_said(f"{path}, line 8: sources[0].urls[1].url", "OTHER_URL is not set")
        await streamer.table_state("public.t", "ready", SECONDS)
        await arrives(1, "eu")
        findings = [str(f) for f in (await check(streamer.settings, streamer.mapping)).findings]
        assert any("shop:us: " in f and "OTHER_URL is not set" in f for f in findings), findings

        monkeypatch.setenv("OTHER_URL", source.url)
        await streamer.apply()
        await streamer.caught_up(SECONDS)
        await arrives(2, "eu", "us")

        configure("${ANOTHER_URL}")
        await streamer.apply()
        await is_said("ANOTHER_URL is not set")
        await arrives(3, "eu")
        configure(f"{source.url}{'&' if '?' in source.url else '?'}user=nobody_of_that_name")
        await streamer.apply()
        await is_said("does not exist", f"{path}, line 8: sources[0].urls[1].url")
        configure(source.url)
        await streamer.apply()
        await streamer.caught_up(SECONDS)
        assert target.value("select count(*) from t where sid = 'us' and id > 1") == 2
    finally:
        await streamer.stop()
