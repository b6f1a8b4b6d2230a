"""Transactions that the target refuses at COMMIT, or does not take for a while."""

import pytest

from streamer.apply.write.target_transaction import TargetTransaction
from tests.support.postgres import Database, assert_same
from tests.support.streamer import MakeStreamer

TRIGGER = """
create table t (id int primary key, v text);
create table refused (v text); insert into refused values ('bad');
create function refuse() returns trigger language plpgsql as $$ begin
  if exists (select from public.refused r where r.v = new.v) then
    raise exception using errcode = '{state}', message = 'refused'; end if;
  return null; end $$;
create constraint trigger refuse after insert or update on t deferrable initially deferred
  for each row execute function refuse();
alter table t enable always trigger refuse
"""
COUNT = 200


async def test_many_refused_transactions_in_a_row_are_diverted_together(
    source: Database, target: Database, stream: MakeStreamer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not row by row: the COMMIT checks the constraints of all rows at once."""
    checks = 0
    check = TargetTransaction.check_constraints

    async def counted(self: TargetTransaction) -> None:
        nonlocal checks
        checks += 1
        await check(self)

    source.execute("create table t (id int primary key, v text)")
    target.execute(TRIGGER.format(state="P0001"))
    async with stream("t: {initial: none, on_error: quarantine}") as streamer:
        await streamer.caught_up()
        target.execute(
            "insert into streamer.request (relation_id, action)"
            " select id, 'pause' from streamer.relation; notify streamer"
        )
        await streamer.table_state("public.t", "paused")
        with source.connect() as connection:
            for n in range(COUNT):
                connection.execute(f"insert into t values ({n}, '{'good' if n % 7 else 'bad'}')")
        monkeypatch.setattr(TargetTransaction, "check_constraints", counted)
        target.execute(
            "insert into streamer.request (relation_id, action)"
            " select id, 'resume' from streamer.relation; notify streamer"
        )
        await streamer.caught_up(60)
        quarantined = len(range(0, COUNT, 7))
        assert target.value("select count(*) from streamer.quarantine") == quarantined
        assert checks < quarantined
        target.execute("truncate refused")
        target.execute(
            "insert into streamer.request (relation_id, action)"
            " select id, 'quarantine_retry' from streamer.relation; notify streamer"
        )

        async def quarantine_is_empty() -> bool:
            return target.value("select count(*) from streamer.quarantine") == 0

        await streamer.eventually(quarantine_is_empty, 40)
        assert_same(source, target, "t")


async def test_a_full_disk_of_the_target_shows_in_status_while_it_lasts(
    source: Database, target: Database, stream: MakeStreamer
) -> None:
    source.execute("create table t (id int primary key, v text)")
    target.execute(TRIGGER.format(state="53100"))
    async with stream("t: {initial: none}") as streamer:
        await streamer.caught_up()
        source.execute("insert into t values (1, 'bad')")

        async def waits() -> bool:
            waiting_for = (await streamer.table("public.t"))["waiting_for"]
            return (
                waiting_for is not None
                and "accept changes again: target: the server says" in waiting_for
            )

        await streamer.eventually(waits, 40)
        target.execute("truncate refused")
        await streamer.caught_up(40)
        assert (await streamer.table("public.t"))["waiting_for"] is None
        assert_same(source, target, "t")
