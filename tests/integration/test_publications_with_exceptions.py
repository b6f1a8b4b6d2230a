"""Publications of all tables with exceptions, which PostgreSQL 19 has, on an older server."""

from dataclasses import replace

import pytest

from streamer.mapping.relation_names import RelationName
from streamer.mapping.rules import SourceMapping
from streamer.postgres.secret import Secret
from streamer.source.connection import connection
from streamer.source.slot_and_publications import publication
from tests.support.postgres import Database


@pytest.mark.since(15)  # pg_publication_namespace
async def test_a_table_that_a_publication_leaves_out_is_not_published(
    source: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PostgreSQL 19 marks such tables in a column. In this test, a condition replaces the column."""
    source.execute(
        "create table kept (id int); create table omitted (id int);"
        " create table whole (id int) partition by list (id);"
        " create table part partition of whole default;"
        " create publication streamer_shop for table kept, omitted, whole"
    )
    sql = publication.publications_sql(19_00_00).replace("r.prexcept", "(c.relname <> 'kept')")
    monkeypatch.setattr(publication, "publications_sql", lambda version: sql)
    mapping = SourceMapping("shop", None, Secret(source.url), ())

    async with connection(mapping) as plain:
        found = await publication.read_publications(plain, mapping, 19_00_00)

    names = {name: RelationName("public", name) for name in ("kept", "omitted", "whole", "part")}
    listed = found["streamer_shop"]
    assert set(listed.members) == {names["kept"]}
    assert listed.excepted == {names["omitted"], names["whole"], names["part"]}
    of_all = replace(listed, has_all_tables=True, members={})
    assert [name for name, relation in names.items() if of_all.has(relation)] == ["kept"]
