"""Whether every value of a type, as text, is a value of another type. Pure.

Types are named as format_type names them. A pair without a proof counts as a risk: the check warns,
the target decides.
"""

from typing import Final

from streamer.schema.source_definition import TypeName, widens

_DIGITS: Final = {"smallint": 5, "integer": 10, "bigint": 19}
_EXACT_DIGITS: Final = {"real": 7, "double precision": 15}
_STRINGS: Final = ("text", "character varying", "character")
_TIMES: Final = (
    "timestamp without time zone",
    "timestamp with time zone",
    "time without time zone",
    "time with time zone",
)
_FRACTION_DIGITS: Final = 6


def type_risk(source: str, target: str) -> str | None:
    """Return the risk of reading text of type *source* as *target*, or None."""
    if widens(source, target):
        return None
    if source.endswith("[]") and target.endswith("[]"):
        return type_risk(source.removesuffix("[]"), target.removesuffix("[]"))
    # Keep an array type whole: `TypeName.parse` would judge `integer[]` by the digits of `integer`.
    old, new = (TypeName(t) if t.endswith("[]") else TypeName.parse(t) for t in (source, target))
    if new.base in _STRINGS:
        return _string_risk(old, new)
    if old.base in _DIGITS or old.base == "numeric" or old.base in _EXACT_DIGITS:
        return _number_risk(old, new)
    if old.base in (*_TIMES, "date") and new.base in (*_TIMES, "date"):
        return _time_risk(old, new)
    if {old.base, new.base} == {"json", "jsonb"}:
        return None if new.base == "json" else "the order and duplicates of its keys are lost"
    return "the target's type may lack values of the source's type"


def _string_risk(source: TypeName, target: TypeName) -> str | None:
    if not target.modifiers:
        # "character" always has a length; the other types accept all text.
        return None if target.base != "character" else "only one character fits"
    (length,) = target.modifiers
    is_padded = target.base == "character" and source.base != "character"
    if source.base not in _STRINGS:
        digits = _DIGITS.get(source.base)
        fits = digits is not None and digits < length
    else:
        fits = bool(source.modifiers) and source.modifiers[0] <= length
    if not fits:
        return f"the target rejects values longer than {length} characters"
    return "values are padded with blanks" if is_padded else None


def _whole_digits(kind: TypeName) -> int | None:
    """Return the maximum number of digits before the decimal point; None without a limit."""
    if kind.base in _DIGITS:
        return _DIGITS[kind.base]
    return kind.whole_digits if kind.modifiers else None


def _scale(kind: TypeName) -> int | None:
    """Return the maximum number of digits after the decimal point; None without a limit."""
    if kind.base in _DIGITS:
        return 0
    return kind.scale if kind.modifiers else None


def _number_risk(source: TypeName, target: TypeName) -> str | None:
    if target.base in _EXACT_DIGITS:
        exact = _EXACT_DIGITS[target.base]
        digits = _EXACT_DIGITS.get(source.base) or _DIGITS.get(source.base)
        if digits is None and source.modifiers:
            digits = source.modifiers[0]
        return None if digits is not None and digits <= exact else "values are rounded"
    if target.base not in _DIGITS and target.base != "numeric":
        return "the target's type may lack values of the source's type"
    if target.base == "numeric" and not target.modifiers:
        return None
    if source.base in _EXACT_DIGITS:
        return "the target rejects large values and rounds others"
    digits_needed, room = _whole_digits(source), _whole_digits(target)
    if target.base in _DIGITS and source.base not in _DIGITS and room is not None:
        room -= 1  # some numbers with as many digits as the largest value exceed that value
    scale, scale_max = _scale(source), _scale(target)
    assert room is not None
    assert scale_max is not None
    if digits_needed is None or digits_needed > room:
        return "the target rejects large values"
    if scale is None or scale > scale_max:
        return "the target rejects fractions" if target.base in _DIGITS else "fractions are rounded"
    return None


def _time_risk(source: TypeName, target: TypeName) -> str | None:
    if source.base == target.base:
        digits, digits_max = (
            k.modifiers[0] if k.modifiers else _FRACTION_DIGITS for k in (source, target)
        )
        return None if digits <= digits_max else "fractions of a second are rounded"
    if source.base == "date":
        return None if target.base.startswith("timestamp") else "the target rejects dates"
    if target.base == "date":
        return "the time of day is lost"
    if target.base.endswith("with time zone"):
        return "values are read as UTC"
    return "the time zone is lost: values are written in UTC"
