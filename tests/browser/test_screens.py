"""The screens of an operator with real content, in a browser: all fit, and are true."""

from functools import partial

import pytest
from playwright.sync_api import expect

from tests.browser.conftest import Sites, look
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
