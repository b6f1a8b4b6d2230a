"""The page in a real browser, on a real process: an operator's work."""

import contextlib
import re

import httpx
import psycopg
import pytest
from playwright.sync_api import Locator, Page, expect

from streamer.admin.page import number_text
from streamer.postgres.quoting import quote_identifier
from tests.browser.conftest import Site, Sites, look
from tests.support.admin import quick_hash
from tests.support.postgres import Database
from tests.support.process import Process
from tests.support.waiting import eventually

pytestmark = pytest.mark.slow

PASSWORD = "hunter2-of-the-source"


def add_source(
    page: Page, name: str, db: Database, *, sid: str = "", tables: tuple[str, ...]
) -> None:
    """Go through the first two steps; the tables are chosen, and not yet sent."""
    page.get_by_label("Name", exact=True).fill(name)
    page.get_by_label("Address").fill(db.url)
    page.get_by_label("Password").fill(PASSWORD)
    page.get_by_label("Source id").fill(sid)
    page.get_by_role("button", name="Test and continue").click()
    expect(page.get_by_role("heading", name=f"Tables of {name}")).to_be_visible()
    for table in tables:
        page.get_by_role("checkbox", name=table, exact=True).check()


def apply(page: Page) -> None:
    """See the plan of the chosen tables, and apply the plan."""
    page.get_by_role("button", name="Add to the draft").click()
    expect(page.get_by_role("heading", name="Plan", exact=True)).to_be_visible()
    page.get_by_role("button", name="Apply").click()
    expect(page.get_by_text("is now running")).to_be_visible()


def row_of(page: Page, table: str) -> Locator:
    return page.get_by_role("row").filter(has=page.get_by_role("link", name=table, exact=True))


def stay(page: Page) -> None:
    """Mark the page: later changes must appear without a reload."""
    page.evaluate("window.isTheSamePage = true")


def has_stayed(page: Page) -> bool:
    return bool(page.evaluate("window.isTheSamePage === true"))


def texts_on(page: Page, path: str, selector: str) -> list[str]:
    """Return the texts of the elements of a second page for this user.

    To load and paint that page would take ten times the CPU.
    """
    texts: list[str] = page.evaluate(
        """async ([path, selector]) => {
            const answer = await fetch(path);
            if (!answer.ok || answer.redirected) throw new Error(`${answer.status} ${answer.url}`);
            const found = new DOMParser().parseFromString(await answer.text(), "text/html");
            return [...found.querySelectorAll(selector)].map((e) => e.textContent.trim());
        }""",
        [path, selector],
    )
    return texts


def test_from_nothing_to_a_copy_that_is_watched(
    sites: Sites, source: Database, target: Database
) -> None:
    source.execute(
        "create table orders (id int primary key, note text);"
        "insert into orders select n, 'x' from generate_series(1, 20000) n;"
        "create table nokey (v text); create unlogged table scratch (id int); analyze"
    )
    site = sites.start("sync: {rows_per_second: 4000, jobs: 1}")
    page = site.page()
    page.goto("/")
    expect(page.get_by_role("heading", name="No source streams yet")).to_be_visible()
    look(page, "first-start")

    # A connection that does not work says so, and no password comes back.
    page.get_by_label("Name", exact=True).fill("shop")
    page.get_by_label("Address").fill("postgresql://nobody:secret-in-url@127.0.0.1:1/shop")
    page.get_by_role("button", name="Test and continue").click()
    expect(page.get_by_role("alert")).to_contain_text("refused")
    assert "secret-in-url" not in page.content()
    look(page, "connection-refused")

    add_source(page, "shop", source, sid="eu", tables=("public.orders", "public.nokey"))
    expect(page.locator(".note.good")).to_contain_text("Connected: PostgreSQL")
    expect(page.get_by_text("unlogged", exact=True)).to_be_visible()
    expect(page.get_by_role("checkbox", name="public.scratch")).to_have_count(0)
    page.get_by_label("Filter").fill("nokey")
    expect(page.get_by_role("checkbox", name="public.orders")).to_be_hidden()
    page.get_by_label("Filter").fill("")
    page.get_by_role("combobox", name="Type of public.nokey").select_option("append")
    page.get_by_label("Target of public.nokey").fill("plain")
    look(page, "tables")
    page.get_by_role("button", name="Add to the draft").click()

    expect(page.get_by_role("row", name="public.orders")).to_contain_text("copy")
    assert source.value("select count(*) from pg_publication") == 0
    look(page, "plan")
    page.get_by_role("button", name="Apply").click()

    # The page shows the progress of the copy, without a reload.
    expect(page.get_by_text("Revision 1 is now running")).to_be_visible()
    stay(page)
    row = row_of(page, "public.orders")
    expect(row.get_by_role("progressbar")).to_be_visible()
    expect(row).to_contain_text("copying")
    look(page, "copying")
    row.get_by_role("link", name="public.orders").focus()
    expect(row).to_contain_text("ready", timeout=60_000)
    expect(row.get_by_role("progressbar")).to_have_count(0)
    expect(row.get_by_role("link", name="public.orders")).to_be_focused()
    expect(row_of(page, "public.nokey")).to_contain_text("public.plain")
    expect(page.locator("#connection")).to_have_text("live")

    # Then the stream: a drawn rate, and no lag in the end.
    source.execute("insert into orders select n, 'y' from generate_series(20001, 40000) n")
    expect(page.locator("[data-spark] polyline")).to_have_count(1)
    eventually(lambda: target.value("select count(*) from orders") == 40000)
    expect(page.get_by_role("heading", name="1 source streams, 2 tables ready")).to_be_visible()
    assert has_stayed(page)
    look(page, "overview")

    row.get_by_role("link", name="public.orders").click()
    expect(page.get_by_role("heading", name="public.orders")).to_be_visible()
    expect(page.get_by_role("row", name="id key integer id integer")).to_be_visible()
    look(page, "table")
    for name, path in (("mapping", "/mapping"), ("history", "/history"), ("export", "/export")):
        page.goto(path)
        look(page, name)
    page.goto("/mapping")
    page.get_by_role("link", name="shop", exact=True).click()
    look(page, "database")
    page.get_by_role("link", name="eu", exact=True).click()
    page.get_by_role("button", name="Test the connection").click()
    expect(page.locator(".note.good")).to_contain_text("Connected")
    look(page, "url")
    assert PASSWORD not in page.content()
    assert PASSWORD not in site.process.output


def test_errors_are_shown_with_their_remedies_and_mended(
    sites: Sites, source: Database, target: Database
) -> None:
    for db in (source, target):
        db.execute(
            "create table t (id int primary key); create table q (id int primary key, v int)"
        )
    target.execute("alter table q add constraint positive check (v > 0)")
    site = sites.start()
    site.map_tables(source, "t", "q")
    page = site.page()
    page.goto("/")
    expect(row_of(page, "public.t")).to_contain_text("ready")
    page.goto("/mapping")
    page.get_by_role("link", name="shop", exact=True).click()
    page.get_by_role("link", name="public.q").click()
    page.get_by_text("More settings").click()
    page.get_by_label("When the target rejects").select_option("quarantine")
    page.get_by_role("button", name="Save to the draft").click()
    expect(page.get_by_text("The draft differs from the applied mapping")).to_be_visible()
    page.get_by_role("link", name="See the plan").click()
    page.get_by_role("button", name="Apply").click()
    expect(page.get_by_text("Revision 2 is now running")).to_be_visible()

    # A column that the target lacks: the page shows the column without a search, and the fix is
    # exact.
    stay(page)
    source.execute("alter table t add v text; insert into t values (1, 'one')")
    row = row_of(page, "public.t")
    expect(row).to_contain_text("error")
    attention = page.get_by_role("region", name="Needs attention")
    expect(attention).to_contain_text("add column")
    assert has_stayed(page)
    look(page, "in-error")
    attention.get_by_role("link").first.click()
    expect(page.get_by_role("region", name="Needs attention")).to_contain_text("add column")
    expect(page.get_by_text("missing in the target")).to_be_visible()
    expect(page.get_by_role("listitem").filter(has_text="has no column").first).to_be_visible()
    look(page, "table-in-error")
    (sql,) = page.get_by_role("region", name="Needs attention").locator("pre").all()
    statement = sql.evaluate("e => e.firstChild.textContent")
    assert statement.startswith("alter table")
    target.execute(statement)
    stay(page)
    page.get_by_role("button", name="Resume").click()
    expect(page.get_by_text("Resume requested")).to_be_visible()
    expect(page.locator(".head .state")).to_have_text("ready")
    eventually(lambda: target.value("select v from t where id = 1") == "one")
    expect(
        page.get_by_role("region", name="Recent errors").get_by_role("listitem")
    ).not_to_have_count(0)

    # Pause and resume, and a second copy.
    page.get_by_role("button", name="Pause").click()
    expect(page.locator(".head .state")).to_have_text("paused")
    page.get_by_role("button", name="Resume").click()
    expect(page.locator(".head .state")).to_have_text("ready")
    target.execute("delete from t")
    page.get_by_text("Copy the table again").first.click()
    page.get_by_role("button", name="Copy the table").click()
    expect(page.get_by_text("Copy requested")).to_be_visible()
    eventually(lambda: target.value("select count(*) from t") == 1)
    expect(page.locator(".head .state")).to_have_text("ready")

    # A row in quarantine: shown, and tried again once the target accepts the row; a second row is
    # dropped.
    source.execute("insert into q values (1, -1), (2, -2), (3, 3)")
    page.goto("/")
    expect(page.get_by_text("2 changes are in quarantine")).to_be_visible()
    page.get_by_text("2 changes are in quarantine").locator("..").get_by_role("link").first.click()
    quarantine = page.get_by_role("region", name="Quarantine")
    expect(quarantine).to_contain_text("id=1")
    look(page, "quarantine")
    quarantine.get_by_role("checkbox").nth(1).check()
    quarantine.get_by_text("Drop …").click()
    quarantine.get_by_role("button", name="Drop the changes").click()
    expect(page.get_by_text("1 change is being dropped")).to_be_visible()
    expect(quarantine.get_by_role("checkbox")).to_have_count(1)
    target.execute("alter table q drop constraint positive")
    quarantine.get_by_label("Apply to").select_option("all")
    quarantine.get_by_role("button", name="Retry", exact=True).click()
    expect(page.get_by_text("No changes are in quarantine")).to_be_visible()
    eventually(lambda: target.execute("select id from q order by 1") == [(1,), (3,)])


def users() -> str:
    return f"""
admin:
  users:
  - {{name: alice, role: admin, password_hash: "{quick_hash("alice's password")}"}}
  - {{name: victor, password_hash: "{quick_hash("victor's password")}"}}
"""


def log_in(page: Page, name: str, password: str) -> None:
    page.get_by_label("Name").fill(name)
    page.get_by_label("Password").fill(password)
    page.get_by_role("button", name="Log in").click()


def test_a_viewer_changes_nothing_and_the_keyboard_reaches_every_control(
    sites: Sites, source: Database
) -> None:
    source.execute("create table t (id int primary key)")
    site = sites.start(users())
    page = site.page()
    page.goto("/sources/new")
    look(page, "login")
    log_in(page, "alice", "guess")
    expect(page.get_by_role("alert")).to_contain_text("name or password is wrong")
    log_in(page, "alice", "alice's password")
    expect(page).to_have_url(f"{site.base}/sources/new")  # where alice wanted to go

    # With the keyboard alone.
    page.keyboard.press("Tab")
    expect(page.get_by_role("link", name="Skip to the content")).to_be_focused()
    page.keyboard.press("Enter")
    page.keyboard.press("Tab")
    expect(page.get_by_label("Name", exact=True)).to_be_focused()
    for typed in ("shop", source.url, "", ""):
        page.keyboard.type(typed)
        page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    expect(page.get_by_role("heading", name="Tables of shop")).to_be_visible()
    box = page.get_by_role("checkbox", name="public.t")
    box.focus()
    page.keyboard.press("Space")
    expect(box).to_be_checked()
    apply(page)
    expect(row_of(page, "public.t")).to_contain_text("ready")

    other = site.page()
    other.goto("/")
    log_in(other, "victor", "victor's password")
    expect(other.get_by_text("victor (viewer)")).to_be_visible()
    row_of(other, "public.t").get_by_role("link").click()
    expect(other.get_by_role("heading", name="Columns")).to_be_visible()
    for path in ("/", "/mapping", "/plan", "/tables/1", "/urls/1", "/databases/1"):
        assert texts_on(other, path, "form button") == ["Log out"], path
    # Nor with a forged form.
    other.goto("/mapping")
    with other.expect_navigation():
        other.evaluate(
            "const f = document.querySelector('form'); f.action = '/databases/1/remove'; f.submit()"
        )
    expect(other.get_by_role("alert")).to_contain_text("has read access only")

    # The session ends for every page that is open.
    third = page.context.new_page()
    third.goto("/")
    third.get_by_role("button", name="Log out").click()
    expect(third.get_by_role("heading", name="Log in")).to_be_visible()
    page.goto("/")
    expect(page.get_by_role("heading", name="Log in")).to_be_visible()
    for hidden in ("alice's password", "victor's password", "$argon2"):
        assert hidden not in site.process.output


HOSTILE = "</td><script>alert('x')</script><img src=x onerror=\"alert(1)\">&amp;{{7*7}}"
"""Text that must appear unchanged."""


def test_hostile_names_and_values_are_text(
    sites: Sites, source: Database, target: Database
) -> None:
    table = quote_identifier(HOSTILE[:60])
    column = quote_identifier("<b onclick=alert(1)>c.*\"'")
    for db in (source, target):
        db.execute(f"create table {table} (id int primary key, {column} text)")
    target.execute(
        f"alter table {table} add constraint {quote_identifier('<i>no</i>')} check (id > 0)"
    )
    site = sites.start("on_error: quarantine")
    page = site.page()
    page.goto("/")
    add_source(page, HOSTILE, source, sid="<b>sid</b>", tables=())
    page.get_by_role("checkbox").first.check()
    apply(page)
    link = page.get_by_role("row").get_by_role("link").first
    expect(link).to_contain_text(HOSTILE[:60])
    expect(page.get_by_role("row").nth(1)).to_contain_text("ready")
    look(page, "hostile")
    source.execute(f"insert into {table} values (-1, '<script>alert(2)</script>')")
    link.click()
    expect(page.get_by_role("heading", level=1)).to_contain_text(HOSTILE[:60])
    expect(page.get_by_text("<b onclick=alert(1)>c.*\"'").first).to_be_visible()
    quarantine = page.get_by_role("region", name="Quarantine")
    expect(quarantine).to_contain_text("<i>no</i>")
    quarantine.get_by_text("all values").click()
    expect(quarantine).to_contain_text("<script>alert(2)</script>")
    look(page, "hostile-table")
    page.get_by_role("button", name="Pause").click()
    expect(page.locator(".head .state")).to_have_text("paused")
    page.get_by_role("link", name="Edit the rule").click()
    page.get_by_text("More settings").click()
    page.get_by_label("Columns left out").fill("</textarea><script>alert(3)</script>")
    page.get_by_role("button", name="Save to the draft").click()
    expect(page.get_by_label("Columns left out")).to_have_value(
        "</textarea><script>alert(3)</script>"
    )
    page.goto("/history")
    expect(page.get_by_text("</textarea><script>").first).to_be_visible()
    page.goto("/plan")
    expect(page.get_by_role("heading", name="Plan", exact=True)).to_be_visible()
    assert "49" not in page.get_by_role("main").inner_text().replace(HOSTILE, "")


def test_static_mode_acts_on_tables_and_edits_no_mapping(
    sites: Sites, source: Database, target: Database
) -> None:
    for db in (source, target):
        db.execute("create table t (id int primary key)")
    source.parameters = f"password={PASSWORD}"
    site = sites.start(
        f'sources: [{{database: shop, urls: [{{url: "{source.url}"}}], tables: {{t: }}}}]'
    )
    page = site.page()
    page.goto("/")
    expect(page.get_by_text("read-only")).to_have_count(0)
    row = row_of(page, "public.t")
    expect(row).to_contain_text("ready")
    expect(page.locator("#connection")).to_have_text("live")
    look(page, "static")
    # The script writes numbers like the server, because numbers would flicker otherwise.
    for name, function in (
        ("size", number_text.size),
        ("duration", number_text.duration),
        ("latency", number_text.latency),
        ("rate", number_text.rate),
        ("count", number_text.count),
    ):
        for value in (0, 7, 89.4, 999, 1001, 12_345, 123_456, 9_876_543, 10**9, 10**13):
            assert page.evaluate(f"v => {name}(v)", value) == function(value), (name, value)
    source.execute("alter table t add v text; insert into t values (1, 'one')")
    expect(row).to_contain_text("error")
    row.get_by_role("link").click()
    expect(page.get_by_text("missing in the target")).to_be_visible()
    page.get_by_role("button", name="Resume").click()
    expect(page.get_by_text("Resume requested")).to_be_visible()
    target.execute("alter table t add v text")
    expect(page.locator(".head .state")).to_have_text("ready")
    # A session holds a lock: the page names the session, and its button ends the session.
    with contextlib.closing(psycopg.connect(target.url)) as holder:
        holder.execute("lock table t in access exclusive mode")
        source.execute("insert into t values (2, 'two')")
        end = page.get_by_role("button", name=f"End session {holder.info.backend_pid}")
        expect(end).to_be_visible()
        look(page, "locked")
        end.click()
        expect(page.get_by_text(f"Session {holder.info.backend_pid} ends")).to_be_visible()
        eventually(lambda: target.value("select count(*) = 2 from t"))
    page.get_by_role("button", name="Pause").click()
    expect(page.locator(".head .state")).to_have_text("paused")
    look(page, "paused")
    page.goto("/mapping")
    yaml = page.locator("pre[data-copy]")
    expect(yaml).to_contain_text("database: shop")
    expect(yaml).to_contain_text("password=***")
    look(page, "static-mapping")
    for path in ("/mapping", "/tables/1", "/urls/1", "/databases/1", "/export"):
        assert texts_on(page, path, "form button:enabled") == [], path
        assert PASSWORD not in page.request.get(path).text()


def test_without_javascript_nothing_is_missing_but_being_live(
    sites: Sites, source: Database, target: Database
) -> None:
    source.execute("create table t (id int primary key); create table u (id int primary key)")
    site = sites.start()
    page = site.page(java_script_enabled=False)
    page.goto("/")
    add_source(page, "shop", source, tables=("public.t",))
    page.get_by_label("Table or pattern").fill("u")
    apply(page)
    reloaded(page, "<h1.*2 tables ready.*</h1>")
    expect(page.get_by_role("heading", level=1)).to_contain_text("2 tables ready")
    row_of(page, "public.t").get_by_role("link").click()
    page.get_by_role("button", name="Pause").click()
    expect(page.get_by_text("Pause requested")).to_be_visible()
    reloaded(page, '<header class="head">.*>paused<')
    expect(page.locator(".head .state")).to_have_text("paused")
    page.get_by_role("button", name="Resume").click()
    expect(page.get_by_text("Resume requested")).to_be_visible()
    reloaded(page, '<header class="head">.*>ready<')
    expect(page.locator(".head .state")).to_have_text("ready")
    page.goto("/mapping")
    page.get_by_role("link", name="shop", exact=True).click()
    page.get_by_role("link", name="public.u").click()
    page.get_by_text("Remove this table").click()
    page.get_by_role("button", name="Remove the table").click()
    page.get_by_role("link", name="See the plan").click()
    expect(page.get_by_role("row", name="public.u")).to_contain_text("remove")
    page.get_by_text("Discard the draft").click()
    page.get_by_role("button", name="Discard", exact=True).click()
    expect(page.get_by_text("equals the applied revision again")).to_be_visible()
    source.execute("insert into u values (1)")
    eventually(lambda: target.value("select count(*) from u") == 1)


def reloaded(page: Page, pattern: str) -> None:
    """Reload *page* as soon as the server's page has *pattern*."""
    eventually(lambda: re.search(pattern, page.request.get(page.url).text()), what=pattern)
    page.reload()


def test_a_source_and_the_target_go_away_and_the_page_says_so(
    sites: Sites, source: Database, target: Database
) -> None:
    source.execute("create table t (id int primary key)")
    site: Site = sites.start()
    site.map_tables(source, "t")
    page = site.page()
    page.goto("/")
    expect(row_of(page, "public.t")).to_contain_text("ready")
    mapping = sites.directory / "mapping.sqlite"
    away = mapping.rename(sites.directory / "away")
    reloaded(page, "was deleted")
    look(page, "mapping-lost")
    away.rename(mapping)
    eventually(lambda: "was deleted" not in page.request.get("/").text())
    page.goto("/")
    stay(page)
    target.server.execute(
        f"alter database {target.name} allow_connections false;"
        f"select pg_terminate_backend(pid) from pg_stat_activity where datname = '{target.name}'"
    )
    try:
        expect(page.get_by_text("the page may show old or incomplete data")).to_be_visible()
        look(page, "target-away")
    finally:
        target.server.execute(f"alter database {target.name} allow_connections true")
    expect(page.get_by_text("the page may show old or incomplete data")).to_have_count(
        0, timeout=60_000
    )
    expect(row_of(page, "public.t")).to_contain_text("ready")
    assert has_stayed(page)

    # The process dies, and comes again: the open page continues.
    row_of(page, "public.t").get_by_role("link").click()
    expect(page.locator("#connection")).to_have_text("live")
    stay(page)
    site.process.kill()
    expect(page.locator("#connection")).to_have_text("not live")
    with Process(site.process.config, spark=False):
        expect(page.locator("#connection")).to_have_text("live", timeout=60_000)
        eventually(
            lambda: page.locator("input[name=csrf]").first.input_value() == fresh_token(site)
        )
        assert has_stayed(page)
        page.get_by_role("button", name="Pause").click()
        expect(page.locator(".head .state")).to_have_text("paused")


def fresh_token(site: Site) -> str:
    """Return the token that forms have now."""
    found = re.search(r'name="csrf" value="([^"]+)"', httpx.get(f"{site.base}/sources/new").text)
    assert found is not None
    return found[1]
