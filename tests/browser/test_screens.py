"""The screens of an operator with real content, in a browser: all fit, and are true."""

import re
from functools import partial

import httpx
import pytest
from playwright.sync_api import expect

from tests.browser.conftest import Sites, look, shifts_of, watch_shifts
from tests.browser.test_page import row_of
from tests.support.postgres import Database
from tests.support.waiting import eventually

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

LARGE = ("customers", "orders", "order_items")
LONG = "a_table_with_a_name_that_is_as_long_as_postgresql_lets_it_be_63"


def test_copies_trends_events_quarantine_and_help_with_real_content(
    sites: Sites, source: Database, target: Database
) -> None:
    for name in LARGE:
        source.execute(
            f"create table {name} (id int primary key, note text);"
            f"insert into {name} select n, repeat('x', 40) from generate_series(1, 8000) n"
        )
    source.execute(
        f'create table payments (id int primary key, amount int); create table "{LONG}" (id int primary key);'
        "create table audit (id int primary key, v text); analyze"
    )
    target.execute(
        "create table payments (id int primary key, amount int constraint positive check (amount > 0));"
        "create table audit (id int primary key)"
    )
    tables = "\n".join(f"    {name}: {{}}" for name in (*LARGE, LONG))
    site = sites.start(
        f"""
sync: {{rows_per_second: 1500, jobs: 1}}
sources:
- database: shop
  urls: [{{url: "{source.url}"}}]
  tables:
    payments: {{on_error: quarantine, initial: none}}
    audit: {{initial: none}}
{tables}
"""
    )
    page = site.page()
    page.goto("/")
    copies = page.get_by_role("region", name="Copies")
    expect(copies).to_contain_text("%", timeout=60_000)
    look(page, "copies")

    # Rows that the target refuses, and a column that the target lacks.
    source.execute(
        "insert into payments select n, -n from generate_series(1, 12) n;"
        "insert into audit values (1, 'a value that the target has no column for')"
    )
    for name in LARGE:
        expect(row_of(page, f"public.{name}")).to_contain_text("ready", timeout=90_000)
    for number in range(1, 6):
        source.execute(
            f"insert into orders select n, 'later' from generate_series({number}0001, {number}0400) n"
        )
        copied = f"select count(*) = {8000 + number * 400} from orders"
        eventually(partial(target.value, copied), 60)
    attention = page.get_by_role("region", name="Needs attention")
    expect(attention.locator("pre").first).to_contain_text(
        'alter table "public"."audit" add column "v" text;'
    )
    look(page, "busy-overview")

    page.goto("/source?database=shop")
    expect(page.get_by_role("region", name="Trends").locator("canvas")).to_have_count(3)
    look(page, "trends")
    page.get_by_role("link", name="public.orders").click()
    expect(page.get_by_role("region", name="Trends").locator("canvas")).to_have_count(3)
    look(page, "table-trends")
    # Once a user opens the page of a table, the process samples the table, also without a change.
    page.goto("/table?database=shop&name=public.audit")
    history = f"{site.base}/api/sources/history/table?database=shop&table=audit"
    eventually(lambda: any(httpx.get(history).json()["held_bytes"]), 60)
    page.goto("/quarantine")
    expect(page.get_by_text("public.payments").first).to_be_visible()
    look(page, "all-quarantine")
    page.goto("/events")
    expect(page.get_by_text("public.audit").first).to_be_visible()
    look(page, "events")
    page.goto("/help")
    look(page, "help")
    for link in page.locator("main nav a, main li a").all()[:1]:
        link.click()
        look(page, "help-page")


PATHS = ("/", "/?view=wall", "/source?database=shop", "/table?database=shop&name=public.orders")


def test_nothing_moves_while_numbers_change(
    sites: Sites, source: Database, target: Database
) -> None:
    source.execute("create table orders (id int primary key, note text)")
    site = sites.start(
        f'sources: [{{database: shop, urls: [{{url: "{source.url}"}}], tables: {{orders: }}}}]'
    )
    sizes = [{"width": width, "height": 900} for width in (1280, 390)]
    pages = {}
    for path in PATHS:
        for size in sizes:
            page = pages[path, size["width"]] = site.page(viewport=size)
            page.goto(path)
            expect(page.locator("#connection")).to_have_text("live")

    def insert(begin: int, count: int) -> None:
        source.execute(
            f"insert into orders select n, 'later' from generate_series({begin}, {begin + count - 1}) n"
        )
        total = f"select count(*) = {begin + count - 1} from orders"
        eventually(partial(target.value, total), 60)

    insert(1, 1)  # a table without a change has a dash, which is shorter
    for (path, _), page in pages.items():
        expect(page.get_by_role("region", name="Trends").locator("canvas").first).to_be_visible()
        if path == "/":
            expect(row_of(page, "public.orders")).to_contain_text("/s")
        page.evaluate("refresh()")
        watch_shifts(page)
    for begin, count in ((2, 20), (22, 300), (322, 40_000)):
        insert(begin, count)
        for page in pages.values():
            page.evaluate("refresh()")
    rates = pages["/source?database=shop", 1280].locator("[data-rate]")
    expect(rates).to_have_text("0/s")  # after the changes
    card = pages["/", 390].get_by_role("region", name="Target")
    expect(card).to_contain_text(re.compile(r"PostgreSQL \d.* of \d+ connections"))
    expect(card.get_by_role("listitem")).to_have_count(4)
    shifts = {key: shifts_of(page) for key, page in pages.items()}
    moved = [f"{key}: {shift}" for key, of_page in shifts.items() for shift in of_page]
    assert not moved, "\n".join(moved)
    for path in PATHS:
        look(pages[path, 1280], f"moving{PATHS.index(path)}")
