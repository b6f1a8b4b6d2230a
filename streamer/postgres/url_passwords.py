"""Finds the passwords in a connection string, so that callers can mask or replace them.

The text around the passwords stays unchanged, with its ``${NAME}`` references. A value that
consists of references is not secret. `streamer.observability.logs` redacts log lines. Pure.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final
from urllib.parse import quote, unquote

from streamer.postgres.conninfo import parse_conninfo

MASK: Final = "***"
"""Stands for the stored password."""

SECRET_PARAMETERS: Final = frozenset(
    {
        "password",
        "sslpassword",
        "oauth_client_secret",
        "scram_client_key",
        "scram_server_key",
    }
)
"""Parameters of libpq with secret values."""

_SCHEME: Final = re.compile(r"postgres(?:ql)?://", re.IGNORECASE)
_REFERENCE: Final = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)\}")
_REFERENCES: Final = re.compile(rf"(?:{_REFERENCE.pattern})*")
# A key=value string: a value is in quotes, or ends with a space; a backslash escapes a character.
_WORD: Final = re.compile(r"\s*([^\s=]+)\s*=\s*('(?:[^'\\]|\\.)*'?|(?:[^\s\\]|\\.)*)", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Span:
    """A secret value in a text: its parameter, start and end."""

    parameter: str
    start: int
    end: int

    def value_in(self, text: str) -> str:
        return text[self.start : self.end]


def secret_spans(text: str) -> list[Span]:
    """Return the places of secret values in *text*, in order; references are not secret."""
    spans = _spans_of_uri(text) if _SCHEME.match(text) else _spans_of_words(text)
    return [span for span in spans if not is_reference(span.value_in(text))]


def _spans_of_uri(text: str) -> list[Span]:
    # As in libpq: user and password end with the first @ before a /; parameters come after the
    # first ?.
    scheme = _SCHEME.match(text)
    assert scheme is not None
    begin = scheme.end()
    spans = []
    end = begin
    while end < len(text) and text[end] not in "@/":
        end += 1
    host_start = begin
    if end < len(text) and text[end] == "@":
        colon = text.find(":", begin, end)
        if colon >= 0:
            spans.append(Span("password", colon + 1, end))
        host_start = end + 1
    query = text.find("?", host_start)
    position = query + 1 if query >= 0 else len(text)
    while position < len(text):
        stop = text.find("&", position)
        stop = len(text) if stop < 0 else stop
        name, equals, _ = text[position:stop].partition("=")
        parameter = unquote(name)
        if equals and parameter in SECRET_PARAMETERS:
            spans.append(Span(parameter, position + len(name) + 1, stop))
        position = stop + 1
    return spans


def _spans_of_words(text: str) -> list[Span]:
    spans = []
    for word in _WORD.finditer(text):
        start, end = word.span(2)
        if word[2].startswith("'"):
            start += 1
            end -= word[2].endswith("'") and len(word[2]) > 1
        if word[1] in SECRET_PARAMETERS:
            spans.append(Span(word[1], start, end))
    return spans


def replace_secrets(text: str, replacement: Callable[[Span], str]) -> str:
    """Return *text* with each secret value replaced."""
    pieces, position = [], 0
    for span in secret_spans(text):
        pieces += [text[position : span.start], replacement(span)]
        position = span.end
    return "".join([*pieces, text[position:]])


def mask(text: str) -> str:
    """Return *text* with ``***`` for each password.

    A text that libpq parses differently than this module is hidden entirely.
    """
    masked = replace_secrets(text, lambda span: MASK)
    try:
        hidden = {
            value
            for name, value in parse_conninfo(without_references(masked)).items()
            if name in SECRET_PARAMETERS and value not in (MASK, _NEUTRAL)
        }
    except ValueError:
        hidden = set()
    return MASK if hidden else masked


def mask_written(text: str, loaded: str) -> str:
    """Return *text* of a file with ``***`` for each password.

    *loaded*: *text* with the values of its variables. A variable may hold a part of the url, so
    that *text* alone does not show the place of the password. Then ``***`` hides all of *text*.
    """
    shown = mask(text)
    try:
        secrets = _secret_values(loaded)
    except ValueError:
        return MASK
    if not secrets or not names_outside_secrets(text):
        return shown
    try:
        check_url(text)
    except ValueError:
        return MASK
    return MASK if any(secret in shown for secret in secrets) else shown


def _secret_values(text: str) -> set[str]:
    """Return the secrets of *text*, as written and as libpq reads them. Raises ValueError."""
    parameters = parse_conninfo(without_references(text))
    values = {str(value) for name, value in parameters.items() if name in SECRET_PARAMETERS}
    written = {span.value_in(text) for span in secret_spans(text)}
    return (values | written) - {"", _NEUTRAL}


def is_reference(text: str) -> bool:
    """Whether *text* consists of references to variables, and so is not secret."""
    return _REFERENCES.fullmatch(text) is not None


def has_mask(text: str) -> bool:
    """Whether *text* has a mask in place of a stored password."""
    return text == MASK or any(span.value_in(text) == MASK for span in secret_spans(text))


def fill_masks(text: str, stored: str) -> str:
    """Return *text* with the passwords of *stored* in place of ``***``.

    Raises ValueError if a password is missing, or if *text* names a different server. A user who
    edits a url must not learn the password by naming a different server.
    """
    if text == mask(stored):
        return stored
    passwords = {span.parameter: span.value_in(stored) for span in secret_spans(stored)}
    if _place(text) != _place(mask(stored)):
        raise ValueError("host, port, user or database change, so enter the password again")

    def lookup(span: Span) -> str:
        if span.value_in(text) != MASK:
            return span.value_in(text)
        if span.parameter not in passwords:
            raise ValueError(f"*** stands for a stored {span.parameter}, but none is stored")
        # the two forms have different escapes
        if bool(_SCHEME.match(text)) != bool(_SCHEME.match(stored)):
            raise ValueError(
                "the url changes between URI and key=value form, so enter the password again"
            )
        return passwords[span.parameter]

    return replace_secrets(text, lookup)


def with_password(text: str, password: str) -> str:
    """Return *text* with *password*, which replaces an existing password."""
    is_uri = _SCHEME.match(text) is not None
    written = password if is_reference(password) else _quoted(password, is_uri=is_uri)
    secrets = _spans_of_uri(text) if is_uri else _spans_of_words(text)
    spans = [span for span in secrets if span.parameter == "password"]
    if spans:
        first = spans[0]
        start, end = first.start, first.end
        if not is_uri and text[start - 1] == "'":
            start, end = start - 1, end + 1
        return text[:start] + written + text[end:]
    if not is_uri:
        return f"{text} password={written}"
    scheme = _SCHEME.match(text)
    assert scheme is not None
    at = re.compile("[^@/]*@").match(text, scheme.end())
    if at is not None:
        return f"{text[: at.end() - 1]}:{written}{text[at.end() - 1 :]}"
    return f"{text}{'&' if '?' in text else '?'}password={written}"


def _quoted(password: str, *, is_uri: bool) -> str:
    if is_uri:
        return quote(password, safe="")
    escaped = password.replace("\\", "\\\\").replace("'", "\\'").replace("${", "$${")
    return f"'{escaped}'"


_NEUTRAL: Final = "1"
_PLACE: Final = ("host", "hostaddr", "port", "user", "dbname", "service", "servicefile")


def without_references(text: str) -> str:
    """Return *text* with a neutral value in place of references, valid even as a port."""
    return _REFERENCE.sub(_NEUTRAL, text)


def names_outside_secrets(text: str) -> list[str]:
    """Return the variables in a connection string that do not stand for a secret."""
    spans = _spans_of_uri(text) if _SCHEME.match(text) else _spans_of_words(text)
    return [
        match[1]
        for match in _REFERENCE.finditer(text.replace("$${", "   "))
        if not any(span.start <= match.start() and match.end() <= span.end for span in spans)
    ]


def _place(text: str) -> dict[str, str]:
    # References must stay distinct, because two variables may be two hosts.
    numbered = _REFERENCE.sub(lambda match: str(int.from_bytes(match[1].encode())), text)
    try:
        parameters = parse_conninfo(numbered)
    except ValueError:
        return {"text": text}
    return {name: parameters[name] for name in _PLACE if name in parameters}


def check_url(text: str) -> None:
    """Reject a url that libpq cannot read, for any value of its references. Raises ValueError."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError("not valid Unicode") from None
    if "\0" in text:
        raise ValueError("a NUL character cannot be part of it")
    if not text.strip():
        raise ValueError("empty")
    if is_reference(text.strip()):
        return  # a variable may hold the whole url
    parse_conninfo(without_references(text).replace("$${", "${"))
