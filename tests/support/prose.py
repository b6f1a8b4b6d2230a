"""The prose of the project: its sentences, and the sentences that break the house rule.

Prose is every text that a person reads: comments, docstrings, messages, help, pages of the
documentation and of the admin server. CONTRIBUTING.md has the rule. To list the sentences of a
folder that break the rule::

    python -m tests.support.prose streamer/source docs/guides
"""

import ast
import io
import re
import sys
import tokenize
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parent.parent.parent
SENTENCE_WORDS_MAX: Final = 25


@dataclass(frozen=True)
class Sentence:
    """A sentence, and the place where its paragraph begins."""

    path: Path
    line: int
    text: str

    @property
    def word_count(self) -> int:
        return len(self.text.split())

    @property
    def is_long(self) -> bool:
        return self.word_count > SENTENCE_WORDS_MAX

    @property
    def hidden_actors(self) -> int:
        return len(HIDDEN_ACTORS.findall(self.text))

    @property
    def passives(self) -> int:
        """The number of passives without an actor."""
        return sum(1 for match in PASSIVE.finditer(self.text) if _is_passive(match, self.text))

    def count(self, words: re.Pattern[str]) -> int:
        """Return how many of *words* the sentence has."""
        return len(words.findall(self.text))

    def __str__(self) -> str:
        return f"{self.path.relative_to(ROOT)}:{self.line}: {self.text}"


# ---- faults --------------------------------------------------------------------------------------

HIDDEN_ACTORS: Final = re.compile(
    r"\b(?:what|whatever|who|whoever|nobody|somebody|anybody|everybody)\b", re.IGNORECASE
)
"""Words that stand for the actor or the object of a sentence where a noun should."""

STANDING_FOR_NOUNS: Final = {
    "pronouns": re.compile(r"\b(?:it|its|itself|they|them|their|themselves)\b", re.IGNORECASE),
    "one": re.compile(r"\b(?:one|ones)\b(?! of\b)", re.IGNORECASE),
    "other": re.compile(r"\b(?:another|others?)\b", re.IGNORECASE),
    "nothing": re.compile(r"\b(?:nothing|everything|something)\b", re.IGNORECASE),
}
"""Words that stand for an object where a noun could. Each is good English now and then."""

IRREGULAR: Final = (
    r"begun|bound|broken|brought|built|caught|chosen|cut|done|drawn|driven|felt|found|forgotten|"
    r"given|gone|heard|held|hidden|kept|known|laid|learnt|led|left|lent|lost|made|meant|met|paid|"
    r"put|read|rewritten|run|said|seen|sent|set|shown|shut|split|spent|stood|stored|struck|taken|"
    r"taught|thought|thrown|told|torn|understood|withdrawn|won|written"
)
PASSIVE: Final = re.compile(
    r"\b(?:is|are|was|were|be|been|being|isn't|aren't|wasn't|weren't)"
    r"(?:\s+(?:not|never|always|only|also|then|already|now|still|just|often|once|\w+ly))*"
    rf"\s+(\w{{2,}}ed|{IRREGULAR})\b",
    re.IGNORECASE,
)
STATES: Final = re.compile(
    r"un\w+|allowed|attached|based|called|closed|configured|connected|damaged|deprecated|detached"
    r"|disabled|done|enabled|exceed|excluded|expected|finished|fixed|gone|held|indeed|installed"
    r"|interested|known|limited|locked|lost|mapped|meant|misspelled|mistaken|mixed|named|need|needed"
    r"|nested|ordered|partitioned|paused|published|quoted|related|required|set|shared|sorted|stopped"
    r"|supposed",
    re.IGNORECASE,
)
"""Participles of a state, as in "the lane is held": such a sentence hides no actor."""


def _is_passive(match: re.Match[str], text: str) -> bool:
    """Whether *match* hides an actor: the participle names no state, and no "by" follows."""
    clause = re.split(r"[,;:.!?()]", text[match.end() :], maxsplit=1)[0]
    return not STATES.fullmatch(match[1]) and not re.search(r"\bby\b", clause)


# ---- sentences -----------------------------------------------------------------------------------

_LITERAL: Final = re.compile(r"``[^`]*``|`[^`]*`")
_LITERALS: Final = re.compile(r"X(?:(?:,|, and|, or| and| or) X)+\b")
_QUOTED: Final = re.compile(r'"\w+"')
_COMMAND: Final = re.compile(r"\b(run(?: there| at the \w+)?|with): .*$", re.DOTALL)
_NUMBER: Final = re.compile(r"^\s*\d+\. ")
_ABBREVIATION: Final = re.compile(r"\b(e\.g|i\.e|cf|etc|vs)\.(?=\s)")
_END: Final = re.compile(r"(?<=[.!?])[\"')*_]*\s+")


def _sentences(path: Path, line: int, paragraph: str) -> Iterator[Sentence]:
    """Yield the sentences of *paragraph*; none of a table, whose lines have columns.

    A word stands for code, for a list of code, for a quoted word, and for a command at the end.
    """
    if re.search(r"\S {2,}\S", paragraph):
        return
    text = _LITERAL.sub("X", " ".join(_NUMBER.sub("", paragraph).split()))
    text = _COMMAND.sub(r"\1: X", _QUOTED.sub("X", _LITERALS.sub("X", text)))
    for sentence in _END.split(_ABBREVIATION.sub(r"\1", text)):
        if re.search(r"[A-Za-z]{2}", sentence):
            yield Sentence(path, line, sentence)


def _paragraphs(text: str) -> Iterator[tuple[int, str]]:
    """Yield the paragraphs and list items of *text* with the number of their first line."""
    first, lines = 0, list[str]()
    for number, line in enumerate([*text.splitlines(), ""]):
        if not line.strip() or re.match(r"\s*(?:[-*] |\d+\. |``\S+``: )", line):
            if lines:
                yield first, "\n".join(lines)
            first, lines = number, []
        if line.strip():
            lines.append(line)


@cache
def nodes(path: Path) -> list[ast.AST]:
    """Return the nodes of a file's tree, the root first. Several tests read all nodes."""
    return list(ast.walk(ast.parse(path.read_bytes())))


# ---- where prose is ------------------------------------------------------------------------------


def _of_comments(path: Path, lines: Iterable[tuple[int, str]]) -> Iterator[Sentence]:
    """Yield the sentences of comment *lines*; adjacent lines are a single text."""
    block: list[str] = []
    first = last = 0
    for number, line in [*lines, (-1, "")]:
        if number != last + 1 and block:
            for offset, paragraph in _paragraphs("\n".join(block)):
                yield from _sentences(path, first + offset, paragraph)
            block = []
        if not block:
            first = number
        block.append(line)
        last = number


def _docstring(text: str) -> str:
    """Return *text* with blank lines in place of examples: indented paragraphs after "::"."""
    lines, is_example = [], False
    for line in text.splitlines():
        if is_example and line.strip() and not line.startswith("        "):
            is_example = False
        lines.append("" if is_example else line)
        is_example = is_example or line.rstrip().endswith("::")
    return "\n".join(lines)


_MARK: Final = re.compile(r"#:?\s*(?:type:|noqa|ruff:|mypy:|pragma|!|-{3,})")
_SPOKEN: Final = re.compile(r"[A-Za-z'\"\-]+(?: [A-Za-z'\"\-]+){2}")
_ENGLISH: Final = re.compile(r"\b(?:the|a|an|is|are|of|to|in|for|with|no|not|it|has)\b")
_SQL: Final = re.compile(
    r"\s*(?:select|insert|update|delete|create|alter|drop|with|set|lock|copy|merge|truncate|from|where"
    r"|grant|revoke|values|and|or|on|join|left|order|group|union|returning|begin|do|case|when|comment"
    r"|coalesce|not|exists|prepare|explain|lateral|if|declare|for|\d*\s*loop|streamer_\w+)\b.*"
    r"(?:\b(?:from|where|into|set|as|is null|exists)\b|::|\$\d|\w\(|\w\.\w)",
    re.DOTALL,
)


def _is_spoken(text: str) -> bool:
    """Whether a string of the code is a text for people, and no SQL."""
    is_sql = _SQL.match(text) or "pg_catalog." in text or text.startswith("#!")
    return bool(_SPOKEN.search(text) and _ENGLISH.search(text) and not is_sql)


def _string(node: ast.expr) -> str | None:
    """Return the text of a string in the code, with "X" in place of each value."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else None
    if isinstance(node, ast.JoinedStr):
        return "".join(_string(part) or "X" for part in node.values)
    return None


def _of_python(path: Path, text: str, *, with_strings: bool) -> Iterator[Sentence]:
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    comments = [t for t in tokens if t.type == tokenize.COMMENT and not _MARK.match(t.string)]
    spoken = [(t.start[0], re.sub(r"^#:? ?", "", t.string), t.line.lstrip()[0]) for t in comments]
    yield from _of_comments(path, [(n, line) for n, line, first in spoken if first == "#"])
    for number, line, first in spoken:
        if first != "#":  # after code, so a separate text
            yield from _sentences(path, number, line)
    seen: set[int] = set()
    for node in nodes(path):
        if isinstance(node, ast.Expr) and (string := _string(node.value)) is not None:
            seen.add(id(node.value))
            for offset, paragraph in _paragraphs(_docstring(string)):
                yield from _sentences(path, node.lineno + offset, paragraph)
        elif isinstance(node, ast.JoinedStr):
            seen.update(id(part) for part in node.values)
        if not with_strings or not isinstance(node, ast.expr) or id(node) in seen:
            continue
        string = _string(node)
        if string is not None and _is_spoken(string):
            for offset, paragraph in _paragraphs(string):
                yield from _sentences(path, node.lineno + offset, paragraph)


def _of_program(path: Path, text: str) -> Iterator[Sentence]:
    return _of_python(path, text, with_strings=True)


def _of_test(path: Path, text: str) -> Iterator[Sentence]:
    return _of_python(path, text, with_strings=False)


def _of_markdown(path: Path, text: str) -> Iterator[Sentence]:
    """Yield the sentences of a page: no code, no headings, no tables, no quotations."""
    text = re.sub(
        r"^ *```.*?^ *```",
        lambda found: "\n" * found[0].count("\n"),
        text,
        flags=re.DOTALL | re.MULTILINE,
    )
    lines = ["" if re.match(r"\s*[#|>]", line) else line for line in text.splitlines()]
    text = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", "\n".join(lines))
    for offset, paragraph in _paragraphs(text):
        yield from _sentences(path, offset + 1, paragraph)


def _of_marked(mark: str) -> Callable[[Path, str], Iterator[Sentence]]:
    """Return the reader of files whose comments begin with *mark*."""
    comment = re.compile(rf"^[ \t]*{mark} ?(.*)$|\s{mark} (.*)$")

    def read(path: Path, text: str) -> Iterator[Sentence]:
        lines = enumerate(text.splitlines(), start=1)
        matches = [(n, m) for n, line in lines if (m := comment.search(line))]
        yield from _of_comments(path, [(n, m[1]) for n, m in matches if m[1] is not None])
        for number, behind_code in matches:
            yield from _sentences(path, number, behind_code[2] or "")

    return read


def _of_template(path: Path, text: str) -> Iterator[Sentence]:
    """Yield the sentences of a page's template: text and comments, no markup."""
    text = re.sub(r"\{#-?(.*?)-?#\}", r"<p>\1<p>", text, flags=re.DOTALL)
    text = re.sub(r"\{\{.*?\}\}", "X", text, flags=re.DOTALL)
    text = re.sub(r"</?(?:code|b|em|strong|a|span|kbd)\b[^>]*>", "", text)
    parts = re.split(r"(<[^>]*>|\{%.*?%\})", text, flags=re.DOTALL)
    line = 1
    for number, part in enumerate(parts):
        if number % 2 == 0:
            for offset, paragraph in _paragraphs(part):
                yield from _sentences(path, line + offset, paragraph)
        line += part.count("\n")


READERS: Final[dict[str, Callable[[Path, str], Iterator[Sentence]]]] = {
    ".py": _of_program,
    ".md": _of_markdown,
    ".sql": _of_marked("--"),
    ".js": _of_marked("//"),
    ".html": _of_template,
    ".yaml": _of_marked("#"),
    ".yml": _of_marked("#"),
    ".sh": _of_marked("#"),
    ".toml": _of_marked("#"),
    ".service": _of_marked("#"),
    "Dockerfile": _of_marked("#"),
    "Makefile": _of_marked("#"),
}


def prose(path: Path) -> list[Sentence]:
    """Return the sentences of a file; empty for a file without prose."""
    text = path.read_text(encoding="utf-8")
    read = READERS.get(path.suffix or path.name)
    if read is None:
        return []
    if path.suffix == ".py" and ROOT / "tests" in path.parents:
        read = _of_test
    return list(read(path, text))


def files(*tops: str) -> list[Path]:
    """Return the files with prose in *tops*: files, or folders with all their files."""
    paths: list[Path] = []
    for top in tops:
        path = ROOT / top
        paths += [path] if path.is_file() else sorted(path.rglob("*"))
    return [path for path in paths if path.is_file() and (path.suffix or path.name) in READERS]


TOPS: Final = ("streamer", "tests", "scripts", "benchmarks", "migrations", "deploy", "docs")
FILES: Final = (
    "README.md",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "config.example.yaml",
    "Makefile",
    "Dockerfile",
    "pyproject.toml",
    "mkdocs.yml",
)


@cache
def rooms() -> dict[str, list[Path]]:
    """Return the files of each room: a folder with all its files, or the files on top."""
    by_room: dict[str, list[Path]] = {}
    for path in files(*TOPS, *FILES):
        parts = path.relative_to(ROOT).parts[:-1]
        by_room.setdefault("/".join(parts[:2]) or ".", []).append(path)
    return by_room


@cache
def prose_of_room(room: str) -> list[Sentence]:
    """Return the sentences of all files of a room."""
    return [sentence for path in rooms()[room] for sentence in prose(path)]


def per_thousand_words(count: int, sentences: Iterable[Sentence]) -> float:
    """Return *count* per thousand words of *sentences*; a small text counts as 500 words."""
    words = sum(sentence.word_count for sentence in sentences)
    return round(1000 * count / max(words, 500), 1)


def main() -> None:
    """List the sentences that break the rule in the files that the command line names."""
    for path in files(*sys.argv[1:]):
        sentences = prose(path)
        for sentence in sentences:
            faults = [
                *(["long"] if sentence.is_long else []),
                *(["actor"] if sentence.hidden_actors else []),
                *(["passive"] if sentence.passives else []),
                *(name for name, words in STANDING_FOR_NOUNS.items() if sentence.count(words)),
            ]
            if faults:
                sys.stdout.write(f"{'+'.join(faults)} {sentence}\n")


if __name__ == "__main__":
    main()
