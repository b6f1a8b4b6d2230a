"""Counts the attributes of composite values in texts, as evidence about types.

PostgreSQL documentation, "Composite Type Input and Output Syntax" and "Array Input and Output
Syntax". Pure.
"""

from collections.abc import Iterator, Mapping

from streamer.schema.indexes_constraints_types import DefinedType, base_type


def attribute_counts(
    text: str, type_name: str, types: Mapping[str, DefinedType]
) -> Iterator[tuple[int, int]]:
    """Yield the OID of the type and the number of attributes of each composite value in *text*.

    *text*: a value of the type with the name *type_name*. *types*: the types by name.
    """
    if type_name.endswith("[]"):
        _, _, elements = text.rpartition("]=") if text.startswith("[") else ("", "", text)
        for element in _items(elements, "{}"):
            yield from attribute_counts(element, type_name.removesuffix("[]"), types)
        return
    type_ = types.get(base_type(type_name))
    if type_ is None:
        return
    if type_.kind == "d":
        yield from attribute_counts(text, type_.base or "", types)
    elif type_.kind == "c" and text.startswith("("):
        items = _items(text, "()")
        yield type_.oid, len(items)
        for item, (_, _, kind) in zip(items, type_.attributes, strict=False):
            yield from attribute_counts(item, kind, types)


def _items(text: str, brackets: str) -> list[str]:
    """Return the items of a literal, in a single list for several dimensions."""
    items, item, is_quoted, place = [], "", False, 0
    while place < len(text):
        character, following = text[place], text[place + 1 : place + 2]
        place += 1
        if character == "\\" or (character == following == '"' and is_quoted):
            item += following
            place += 1
        elif character == '"':
            is_quoted = not is_quoted
        elif is_quoted or character not in (",", *brackets):
            item += character
        elif character == ",":
            items.append(item)
            item = ""
    return [*items, item]
