"""The page in a real browser, on a real process: what an operator does with it."""

import pytest
from playwright.sync_api import Page, expect

from tests.browser.conftest import Sites, look
from tests.support.postgres import Database
from tests.support.process import eventually

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

PASSWORD = "hunter2-of-the-source"


def add_source(
    page: Page, name: str, db: Database, *, sid: str = "", tables: tuple[str, ...]
) -> None:
    """Go through the first two steps."""
    page.get_by_label("Name", exact=True).fill(name)
    page.get_by_label("Address").fill(db.url)
    page.get_by_label("Password").fill(PASSWORD)
    page.get_by_label("Source id").fill(sid)
    page.get_by_role("button", name="Test and go on").click()
    expect(page.get_by_role("heading", name=f"Tables of {name}")).to_be_visible()
    for table in tables:
        page.get_by_role("checkbox", name=table, exact=True).check()


def test_from_nothing_to_a_copy_that_is_seen_live(
    sites: Sites, source: Database, target: Database
) -> None:
    source.execute(
        "create table orders (id int primary key, note text);"
        "insert into orders select n, 'x' from generate_series(1, 5000) n;"
        "create table nokey (v text); create unlogged table scratch (id int); analyze"
    )
    site = sites.start()
    page = site.page()
    page.goto("/")
    expect(page.get_by_role("heading", name="Nothing is streamed yet")).to_be_visible()
    look(page, "first-start")

    page.get_by_label("Name", exact=True).fill("shop")
    page.get_by_label("Address").fill("postgresql://nobody:secret-in-url@127.0.0.1:1/shop")
    page.get_by_role("button", name="Test and go on").click()
    expect(page.get_by_role("alert")).to_contain_text("refused")
    assert "secret-in-url" not in page.content()
    look(page, "connection-refused")

    add_source(page, "shop", source, sid="eu", tables=("public.orders", "public.nokey"))
    expect(page.locator(".note.good")).to_contain_text("Connected: PostgreSQL")
    expect(page.get_by_text("unlogged", exact=True)).to_be_visible()
    look(page, "tables")
    page.get_by_role("combobox", name="Type of public.nokey").select_option("append")
    page.get_by_label("Target of public.nokey").fill("plain")
    page.get_by_role("button", name="Add to the draft").click()

    expect(page.get_by_role("heading", name="Plan")).to_be_visible()
    expect(page.get_by_role("row", name="public.orders")).to_contain_text("copy")
    assert source.value("select count(*) from pg_publication") == 0
    look(page, "plan")
    page.get_by_role("button", name="Apply").click()

    expect(page.get_by_text("Revision 1 runs now")).to_be_visible()
    row = page.get_by_role("row", name="public.orders")
    expect(row).to_contain_text("ready")
    expect(row).to_contain_text("5\u202f000")
    expect(page.locator("#connection")).to_have_text("live")
    source.execute("insert into orders select n, 'y' from generate_series(5001, 9000) n")
    expect(page.locator("[data-spark] polyline")).to_have_count(1)
    eventually(lambda: target.value("select count(*) from orders") == 9000)
    look(page, "overview")
    row.get_by_role("link", name="public.orders").click()
    expect(page.get_by_role("heading", name="public.orders")).to_be_visible()
    look(page, "table")
    page.goto("/mapping")
    look(page, "mapping")
    page.get_by_role("link", name="shop", exact=True).click()
    look(page, "database")
    page.get_by_role("link", name="public.orders").click()
    look(page, "rule")
    page.goto("/history")
    look(page, "history")
    assert PASSWORD not in site.process.output
