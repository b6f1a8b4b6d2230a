"""Each step that the program prints has a test that runs it, where the program prints it."""

from typing import Final

from tests.support.remedies import read_followed, read_places

WITHOUT_TEST: Final = frozenset(
    {
        "apply.make_plan:_check_history_columns",
        "apply.planner:Planner._check_actions",
        "apply.planner:Planner._check_hashed_types",
        "apply.planner:Planner._columns_now",
        "apply.rejection_advice:_ways",
        "apply.table_change:TableChange._stop",
        "commands.requests:find_gap",
        "indexes.foreign_keys:_build_once",
        "postgres.conninfo:reach_hint",
        "report.problems:",
        "report.problems:_TableRules._of_definitions",
        "report.problems:_of_wal",
        "runtime.missed_scripts:missed",
        "runtime.publications:Publishing._check_there",
        "runtime.publications:Publishing._judge_faults",
        "runtime.publications:Publishing._judge_identities",
        "runtime.script_runner:Scripts._refused",
        "runtime.table_events:TableEvents._cannot_reach",
        "runtime.target_watch:ask",
        "source.catalog:check_ready",
        "source.large_rows:name_large_row",
        "source.ownership:take_over_hint",
        "source.ownership:unproven_rows",
        "source.primaries:require_successor",
        "source.primary:primary_hint",
        "source.publication:PublicationFault.error",
        "source.publication:_rejected",
        "source.slot:Slot.misfit",
        "source.slot:_wait_hint",
        "source.standbys:judge_standby_wait",
        "sync.create_tables:_create_type",
        "sync.create_tables:create_tables",
        "sync.gap_reports:_look",
        "sync.gap_reports:look_at_columns",
        "sync.hand_over:Finisher._fail_part",
        "sync.prepare:Preparation._check_readable",
        "sync.prepare:_choose_mode",
        "sync.refused_values:way_for_values",
        "sync.shared_tables:widen_shared_table",
        "target.add_columns:add_columns",
    }
)
"""Places whose steps no test runs yet. This list only becomes shorter."""


def test_every_remedy_has_a_test_that_follows_it() -> None:
    places, followed = set(read_places()), set(read_followed())
    assert followed <= places, "a test follows the remedy of a place that is gone"
    assert not followed & WITHOUT_TEST, "take them out of WITHOUT_TEST"
    missing = places - followed
    assert missing == WITHOUT_TEST, "mark the test that runs it: @pytest.mark.follows(PLACE)"


def test_the_catalogue_finds_the_places_of_all_kinds_of_steps() -> None:
    makers = {maker for calls in read_places().values() for maker in calls}
    assert makers == {"run", "at_source", "at_target", "Command", "resync_source"}
