"""`tenants` writes urls into a configuration file, and leaves the rest of the file unchanged."""

import pytest
import yaml

from streamer.config.edit_urls_in_file import add_url, remove_url

BLOCK = """\
# The warehouse.
target: {url: "postgresql://dw"}
sources:
  - database: shop   # all shops
    urls:
      # the first one
      - {url: "postgresql://${USER}@eu/shop", sid: eu}  # in Frankfurt
      - url: postgresql://us/shop
        sid: us
        # after the last source

    tables:
      orders:
  - database: crm
    urls: [{url: "postgresql://crm", sid: a}, {url: "postgresql://b", sid: b}]  # flow
    tables: {customers: }
"""


def urls(text: str, group: int) -> list[tuple[str, str]]:
    found = yaml.safe_load(text)["sources"][group]["urls"]
    return [(each["url"], each["sid"]) for each in found]


def lines(text: str) -> list[str]:
    return text.splitlines()


def test_a_url_is_added_below_the_others_and_all_comments_stay() -> None:
    changed = add_url(BLOCK, "shop", "postgresql://${USER}@t7/shop", "t7")
    assert changed is not None
    new = [line for line in lines(changed) if line not in lines(BLOCK)]
    assert new == ['      - {url: "postgresql://${USER}@t7/shop", sid: t7}']
    assert [line for line in lines(changed) if line not in new] == lines(BLOCK)
    assert urls(changed, 0)[-1] == ("postgresql://${USER}@t7/shop", "t7")


def test_a_url_is_added_to_a_list_on_one_line() -> None:
    changed = add_url(BLOCK, "crm", "postgresql://c", "no")
    assert changed is not None
    assert changed.count("\n") == BLOCK.count("\n")
    assert "# flow" in changed
    assert urls(changed, 1)[-1] == ("postgresql://c", "no")  # a text, and not false


@pytest.mark.parametrize(("group", "database", "sid"), [(0, "shop", "eu"), (0, "shop", "us")])
def test_a_url_is_taken_out_with_its_lines_alone(group: int, database: str, sid: str) -> None:
    changed = remove_url(BLOCK, database, sid)
    assert changed is not None
    left = [line for line in lines(BLOCK) if line not in lines(changed)]
    assert all(sid in line for line in left)
    assert [each for _, each in urls(changed, group)] == [
        each for _, each in urls(BLOCK, group) if each != sid
    ]


@pytest.mark.parametrize("sid", ["a", "b"])
def test_a_url_is_taken_out_of_a_list_on_one_line(sid: str) -> None:
    changed = remove_url(BLOCK, "crm", sid)
    assert changed is not None
    assert [each for _, each in urls(changed, 1)] == [each for each in "ab" if each != sid]


@pytest.mark.parametrize(
    "text",
    [
        "sources: [{database: shop, urls: &u [{url: a, sid: a}]}, {database: b, urls: *u}]",
        "sources: [{database: shop, urls: []}]",
        "sources: {shop: 1}",
        "sources: [",
        "target: {url: x}",
    ],
)
def test_a_file_that_cannot_be_edited_surely_is_left_to_the_operator(text: str) -> None:
    assert add_url(text, "shop", "postgresql://x", "x") is None
    assert remove_url(text, "shop", "a") is None


def test_the_last_url_of_a_group_is_not_taken_out() -> None:
    assert remove_url("sources: [{database: s, urls: [{url: a, sid: a}]}]", "s", "a") is None
