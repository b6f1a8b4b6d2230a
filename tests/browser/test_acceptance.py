"""As a new user would: an empty SQLite file and a browser."""

import os
import re
from pathlib import Path

import pytest
import yaml
from playwright.sync_api import Page, expect

from tests.browser.conftest import Sites, look
from tests.browser.test_page import PASSWORD, add_source, apply, row_of
from tests.support.postgres import Database, contents, database
from tests.support.process import Process
from tests.support.waiting import eventually

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

TABLES = """
create table orders (id int primary key, note text);
create table items (id int primary key, order_id int, price numeric)
"""


def test_two_sources_a_table_broken_and_mended_and_the_export_runs(
    sites: Sites, source: Database, target: Database
) -> None:
    with database(source.server, "other") as other:
        for number, db in enumerate((source, other)):
            db.execute(TABLES)
            db.execute(
                f"insert into orders select n, 'before' from generate_series(1, {500 + number}) n"
            )
        site = sites.start()
        page = site.page()
        page.goto("/")

        # The first source with its tables; the second source of the group has the same tables
        # already.
        add_source(page, "shop", source, sid="eu", tables=("public.orders", "public.items"))
        apply(page)
        expect(page.get_by_role("heading", name="1 source streams, 2 tables ready")).to_be_visible()
        page.get_by_role("link", name="Add a source").click()
        add_source(page, "shop", other, sid="us", tables=())
        expect(page.get_by_text("in the draft", exact=True)).to_have_count(2)
        page.get_by_role("button", name="Continue with the 2 tables in the draft").click()
        expect(page.get_by_role("region", name="Source shop:us")).to_contain_text("new")
        page.get_by_role("button", name="Apply").click()
        expect(page.get_by_role("heading", name="2 sources stream, 4 tables ready")).to_be_visible()
        source.execute("insert into items values (1, 1, 9.99)")
        other.execute("delete from orders where id <= 100; update orders set note = 'after'")
        same(source, target, "eu")
        same(other, target, "us")

        # A column is missing at the target; the user finds and mends the problem from the page
        # alone.
        target.execute("alter table items drop column price")
        source.execute("insert into items values (2, 1, 5)")
        attention = page.get_by_role("region", name="Needs attention")
        expect(attention).to_contain_text("shop:eu public.items")
        look(page, "acceptance-broken")
        attention.get_by_role("link", name="shop:eu public.items").click()
        statement = attention.locator("pre").first.evaluate("e => e.firstChild.textContent")
        assert "price" in statement
        target.execute(statement)
        page.get_by_role("button", name="Resume").click()
        expect(page.locator(".head .state")).to_have_text("ready")
        page.get_by_text("Copy the table again …").click()
        page.get_by_role("button", name="Copy the table").click()
        expect(page.locator(".head .state")).to_have_text("ready")
        same(source, target, "eu")
        page.goto("/")
        mend_others(page)
        same(other, target, "us")
        look(page, "acceptance")

        exported = export(page, sites.directory)
        assert site.process.terminate() == 0
        assert PASSWORD not in exported.read_text() + site.process.output
        variables = re.findall(r"\$\{(\w+)\}", exported.read_text())
        environment = dict.fromkeys(variables, PASSWORD)
        assert len(environment) == 2
        for file in sites.directory.glob("*"):
            assert not file.is_file() or PASSWORD.encode() not in file.read_bytes(), file
        with Process(exported, spark=False, environment=environment):
            source.execute("insert into orders values (9001, 'by the exported file')")
            other.execute("insert into items values (7, 7, 7)")
            same(source, target, "eu")
            same(other, target, "us")


def mend_others(page: Page) -> None:
    """Each source that wrote next stopped for the missing column: none may stay in error."""
    expect(page.get_by_role("heading", name="2 sources stream, 4 tables ready")).to_be_visible()
    expect(row_of(page, "public.items")).to_have_count(2)


def export(page: Page, directory: Path) -> Path:
    page.get_by_role("link", name="Mapping").click()
    page.get_by_role("link", name="Export as YAML").click()
    with page.expect_download() as download:
        page.get_by_role("link", name="Download config.yaml").click()
    path = directory / "exported" / "config.yaml"
    download.value.save_as(path)
    assert [s["database"] for s in yaml.safe_load(path.read_text())["sources"]] == ["shop"]
    os.chmod(path, 0o600)
    return path


def same(source: Database, target: Database, sid: str) -> None:
    """Wait until the target has exactly the rows of *source* under the sid."""
    for table, columns in (("orders", "id, note"), ("items", "id, order_id, price")):
        wanted = contents(source, table, f"row({columns})")
        sql = f"select (row({columns}))::text from {table} where sid = '{sid}' order by 1"

        def is_there(sql: str = sql, wanted: object = wanted) -> bool:
            return target.execute(sql) == wanted

        eventually(is_there, seconds=60, what=f"{sid} {table}")
