"""Adds a url to a group in the text of a configuration file, or removes a url. Pure.

Only the lines of the url change: comments, order and layout of the file stay. Where the layout
prevents the edit, as with an alias in place of the list, the functions return None, and an operator
edits the file.
"""

import json
import re
from typing import Any, Final

import yaml

_PLAIN: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]*\Z")
_WORDS: Final = frozenset({"null", "true", "false", "yes", "no", "on", "off", "y", "n"})


def url_line(url: str, sid: str) -> str:
    """Return a url as an item of `urls`, in YAML's flow style."""
    is_plain = _PLAIN.match(sid) and sid.lower() not in _WORDS
    return f"{{url: {json.dumps(url)}, sid: {sid if is_plain else json.dumps(sid)}}}"


def add_url(text: str, database: str, url: str, sid: str) -> str | None:
    """Return *text* with a url added to the group *database*."""
    urls = _urls(text, database)
    if urls is None or not urls.value:
        return None
    last = urls.value[-1]
    if urls.flow_style:
        changed = _insert(text, last.end_mark.index, f", {url_line(url, sid)}")
    else:
        first = urls.value[0]
        indent = _indent_of_item(text, first)
        end = _end_of_item(text, last)
        if indent is None:
            return None
        newline = "" if text[:end].endswith("\n") else "\n"
        changed = _insert(text, end, f"{newline}{indent}- {url_line(url, sid)}\n")
    return _checked(text, changed, database, lambda items: [*items, {"url": url, "sid": sid}])


def remove_url(text: str, database: str, sid: str) -> str | None:
    """Return *text* without the url of *sid* in the group *database*."""
    urls = _urls(text, database)
    if urls is None or len(urls.value) < 2:
        return None
    sids = [_scalar(item, "sid") for item in urls.value]
    if sids.count(sid) != 1:
        return None
    number = sids.index(sid)
    item = urls.value[number]
    if urls.flow_style:
        if number:
            begin, end = urls.value[number - 1].end_mark.index, item.end_mark.index
        else:
            begin, end = item.start_mark.index, urls.value[1].start_mark.index
    else:
        begin = text.rindex("\n", 0, item.start_mark.index) + 1
        end = _end_of_item(text, item)
        if text[begin : item.start_mark.index].strip() != "-":
            return None
    changed = text[:begin] + text[end:]
    return _checked(
        text, changed, database, lambda items: [i for n, i in enumerate(items) if n != number]
    )


def _urls(text: str, database: str) -> yaml.SequenceNode | None:
    """Return the list of urls of the only group of that name."""
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.YAMLError:
        return None
    sources = _value(root, "sources")
    if not isinstance(sources, yaml.SequenceNode):
        return None
    groups = [group for group in sources.value if _scalar(group, "database") == database]
    if len(groups) != 1:
        return None
    urls = _value(groups[0], "urls")
    # An alias stands for a list elsewhere in the file, which other groups may use.
    has_aliases = any(isinstance(token, yaml.AliasToken) for token in yaml.scan(text))
    return urls if isinstance(urls, yaml.SequenceNode) and not has_aliases else None


def _value(node: yaml.Node | None, key: str) -> yaml.Node | None:
    if not isinstance(node, yaml.MappingNode):
        return None
    for name, value in node.value:
        if isinstance(name, yaml.ScalarNode) and name.value == key:
            match: yaml.Node = value
            return match
    return None


def _scalar(node: yaml.Node, key: str) -> str | None:
    value = _value(node, key)
    return value.value if isinstance(value, yaml.ScalarNode) else None


def _indent_of_item(text: str, item: yaml.Node) -> str | None:
    line = text[text.rfind("\n", 0, item.start_mark.index) + 1 : item.start_mark.index]
    indent, dash, tail = line.partition("-")
    return indent if dash and not indent.strip() and not tail.strip() else None


def _end_of_item(text: str, item: yaml.Node) -> int:
    """Return where the line after the last line of *item* begins; includes its comments."""
    while isinstance(item, yaml.MappingNode) and not item.flow_style and item.value:
        item = item.value[-1][1]  # the end mark of a block follows the comments
    end = len(text[: item.end_mark.index].rstrip())
    newline = text.find("\n", end)
    return len(text) if newline < 0 else newline + 1


def _insert(text: str, at: int, added: str) -> str:
    return text[:at] + added + text[at:]


def _checked(text: str, changed: str, database: str, change: Any) -> str | None:
    """Return *changed* if only the change makes its values differ from *text*."""
    try:
        expected, actual = yaml.safe_load(text), yaml.safe_load(changed)
    except yaml.YAMLError:
        return None
    groups: list[dict[str, Any]] = expected["sources"]
    for group in groups:
        if group["database"] == database:
            group["urls"] = change(group["urls"])
    return changed if expected == actual else None
