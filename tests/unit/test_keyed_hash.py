"""streamer hashes values in messages and in lines of COPY as decoding and `hmac` would."""

import hmac
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamer.apply.rows.binary_transfer import binary_obstacle, binary_types
from streamer.apply.rows.hashed_columns import check_input_types, hashed_message
from streamer.apply.rows.make_plan import make_plan
from streamer.config.static_mapping import load
from streamer.copy.copy_query import CopyInput, copy_source
from streamer.copy.parts.ctid_ranges import Heap, cut
from streamer.copy.parts.part_copier import CopyEnds
from streamer.copy.resync_scope import unchanged_columns
from streamer.decode.pgoutput import Column, Relation
from streamer.errors.error_classes import ConfigurationError, MappingError
from streamer.errors.remedies import run
from streamer.mapping.mapping_fingerprint import fingerprint
from streamer.mapping.recomputed_columns import recomputed
from streamer.mapping.relation_names import RelationName
from streamer.mapping.rules import Mapping, RelationMapping, resolve
from streamer.postgres.keyed_hash import KeyedHash, hashed_line, key_check
from tests.unit.build import relation, source_column, target_column, target_relation

KEY = "0123456789abcdef0123456789abcdef"
OTHER = "fedcba9876543210fedcba9876543210"
STATE = KeyedHash(KEY.encode())


def expected(value: bytes) -> bytes:
    return hmac.digest(KEY.encode(), value, "sha256").hex().encode()


@given(st.binary(min_size=1, max_size=200), st.lists(st.binary(max_size=90), max_size=3))
def test_a_hash_is_that_of_hmac(key: bytes, pieces: list[bytes]) -> None:
    assert (
        KeyedHash(key).digits(pieces).decode() == hmac.digest(key, b"".join(pieces), "sha256").hex()
    )


Value = tuple[str, bytes]
VALUES = st.one_of(
    st.just(("n", b"")), st.just(("u", b"")), st.tuples(st.sampled_from("tb"), st.binary())
)
TUPLES = st.lists(VALUES, min_size=3, max_size=3)


def message(kind: str, tuples: list[tuple[str, list[Value]]]) -> bytes:
    made = kind.encode() + b"\0\0\0\7"
    for name, values in tuples:
        made += name.encode() + len(values).to_bytes(2, "big")
        for form, value in values:
            made += form.encode()
            if form in "tb":
                made += len(value).to_bytes(4, "big") + value
    return made


@given(st.sampled_from(["IN", "UN", "UKN", "UON", "DK", "DO"]), st.data())
def test_messages_equal_decoding_hashing_and_encoding(shape: str, data: st.DataObject) -> None:
    tuples = [(name, data.draw(TUPLES)) for name in shape[1:]]
    plain = message(shape[0], tuples)
    hashed = message(
        shape[0],
        [
            (
                name,
                [
                    *values[:1],
                    *((f, expected(v) if f in "tb" else v) for f, v in values[1:2]),
                    *values[2:],
                ],
            )
            for name, values in tuples
        ],
    )
    assert hashed_message(plain, {1: STATE}) == hashed
    view: bytes = memoryview(plain)  # type: ignore[assignment]
    assert bytes(hashed_message(view, {1: STATE})) == hashed
    for end in range(1, 22):  # a malformed message keeps no value
        cut = message("I", [("N", [("t", b"1"), ("t", b"secret")])])[:end]
        assert b"s" not in hashed_message(cut, {1: STATE})


@given(
    st.lists(st.one_of(st.none(), st.text(st.characters(codec="utf-8"))), min_size=2, max_size=4)
)
def test_lines_of_copy_equal_decoding_hashing_and_encoding(values: list[str | None]) -> None:
    escapes = {
        "\\": r"\\",
        "\b": r"\b",
        "\f": r"\f",
        "\n": r"\n",
        "\r": r"\r",
        "\t": r"\t",
        "\v": r"\v",
    }

    def line(fields: list[str | None]) -> bytes:
        written = (
            r"\N" if each is None else "".join(escapes.get(c, c) for c in each) for each in fields
        )
        return "\t".join(written).encode() + b"\n"

    there = values[1]
    hashed = None if there is None else expected(there.encode()).decode()
    assert hashed_line(line(values), [(1, STATE)]) == line([values[0], hashed, *values[2:]])


def config(path: Path, rule: str, *, key: str = KEY, group: str = "") -> Path:
    file = path / "config.yaml"
    file.write_text(
        f"target: {{url: 'postgresql://t/t'}}\nhash_keys: {{people: {{key: {key}}}}}\n"
        f"sources:\n- database: shop\n  urls: [{{url: 'postgresql://s/s'}}]\n  {group}\n"
        f"  tables: {{t: {rule}}}\n"
    )
    return file


HASHED = "set: {email: {hmac: email, key: people}}"


@pytest.mark.parametrize(
    ("rule", "problem"),
    [
        ("set: {email: {hmac: email, key: nobody}}", "there is no hash key"),
        ("set: {hash: {hmac: email, key: people}}", "replaces the column itself"),
        (f"{HASHED}, exclude: [email]", 'remove "email" from `exclude`'),
        ("set: {hash: {hmac: email, key: people}}, columns: {email: mail}", "write `email: hash`"),
        (
            "set: {hash: {hmac: email, key: people}}, exclude: [email], columns: {id: hash}",
            "another column is written",
        ),
        (
            "set: {a: {hmac: email, key: people}, b: {hmac: email, key: people}}, exclude: [email]",
            "has two hashes",
        ),
        (f"{HASHED}, columns: {{id: id, email: mail}}", "which has no expression"),
        (f'{HASHED}, filter: "email is not null"', "filter uses column"),
        ("set: {email: {hmac: email, key: people}, low: lower(email)}", "low uses column"),
        (f"{HASHED}, initial: none", "a new key would leave old hashes"),
        (f"{HASHED}, partitioned: true", "cannot be used with a hashed column"),
    ],
)
def test_a_rule_that_would_bring_the_plain_value_is_refused(
    tmp_path: Path, rule: str, problem: str
) -> None:
    with pytest.raises(ConfigurationError, match=problem):
        load(config(tmp_path, f"{{{rule}}}"))


def test_a_hash_can_have_another_name_than_its_column(tmp_path: Path) -> None:
    hashed = "set: {hash: {hmac: email, key: people}}"
    for rest in ("exclude: [email, note]", "columns: {email: hash}, exclude: [note]"):
        _, mapping = load(config(tmp_path, f"{{{hashed}, {rest}}}"))
        made = next(iter(resolved(mapping)))
        names = ["id", "email", "hash", "note"]
        assert [made.target_column(name) for name in names] == ["id", "hash", None, None]
        assert not made.is_optional("email")
        assert made.rule.exclude == {"note"}  # a column list has the input of the hash


def test_captured_definitions_and_short_or_missing_keys_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="ddl: capture"):
        load(config(tmp_path, f"{{{HASHED}}}", group="ddl: capture"))
    with pytest.raises(ConfigurationError, match="at least 32 characters") as short:
        load(config(tmp_path, f"{{{HASHED}}}", key="hunter2"))
    assert "hunter2" not in str(short.value)
    file = config(tmp_path, f"{{{HASHED}}}")
    file.write_text(file.read_text().replace(f"key: {KEY}", "key_file: /nowhere"))
    with pytest.raises(ConfigurationError, match="key_file /nowhere: No such file"):
        load(file)


def test_a_command_prints_a_key_and_no_error_repeats_it(tmp_path: Path) -> None:
    plain = config(tmp_path, f"{{{HASHED}}}").read_text()
    key_of = "printf '%s\\n' "
    for command, problem in [
        (f"{key_of}{KEY}", None),
        (f"sh -c 'echo {KEY}; echo {KEY} >&2; exit 3'", "key_command: it ended with exit status 3"),
        (f"{key_of}hunter2", "key_command: expected one line of at least 32 characters"),
        (f"echo -e '{KEY}\n{KEY}'", "key_command: expected one line"),
        ("/nowhere/at/all", "key_command: No such file"),
    ]:
        file = tmp_path / "config.yaml"
        file.write_text(plain.replace(f"key: {KEY}", f"key_command: {json.dumps(command)}"))
        if problem is None:
            _, mapping = load(file)
            assert mapping.sources[0].rules[0].hashes[0].key.reveal() == KEY
            continue
        with pytest.raises(ConfigurationError, match=problem) as error:
            load(file)
        assert KEY not in str(error.value)
        assert "hunter2" not in str(error.value)
    file.write_text(plain.replace(f"key: {KEY}", f"key: {KEY}, key_command: 'true'"))
    with pytest.raises(ConfigurationError, match="one of key, key_file and key_command"):
        load(file)


def test_a_job_of_spark_describes_parts_without_the_key(tmp_path: Path) -> None:
    """Only the two ends of a job have the key, beside the connection strings."""
    _, mapping = load(config(tmp_path, f"{{{HASHED}}}"))
    made = next(iter(resolved(mapping)))
    order = CopyInput(
        relation_id=1,
        attempt=1,
        mapping=made,
        columns=[source_column("id"), source_column("email")],
        target=target_relation(["id", "email"]),
        sid=None,
        destination="public.t",
        heaps=(Heap("public.t", 9, 1),),
        can_split=False,
    )
    (part,) = cut(copy_source(order, 18_00_00, 18_00_00))
    described = json.dumps(part.to_json())
    assert key_check(KEY) in described
    assert KEY not in described
    assert "hmac" not in described
    ends = CopyEnds("source", "target", "s", "a", ("1", 1, 0), (1, 1, 1, "t"), hash_keys={"c": KEY})
    assert KEY not in repr(ends)


def test_another_key_is_another_rule_and_its_rows_need_a_copy(tmp_path: Path) -> None:
    settings, first = load(config(tmp_path, f"{{{HASHED}}}"))
    _, second = load(config(tmp_path, f"{{{HASHED}}}", key=OTHER))
    rules = [mapping.sources[0].rules[0] for mapping in (first, second)]
    assert rules[0].expressions_fingerprint != rules[1].expressions_fingerprint
    assert fingerprint(first) != fingerprint(second)
    assert KEY not in repr(first) + repr(settings) + str(rules[0].expressions_fingerprint)
    made = next(iter(resolved(second)))
    assert recomputed(rules[0].expressions_fingerprint, made, ["id", "email"]) is None
    assert recomputed(None, made, ["id", "email"]) is None
    assert key_check(KEY) != key_check(OTHER)


def resolved(mapping: Mapping) -> list[RelationMapping]:
    return resolve(mapping.sources[0], [RelationName("public", "t")], "public")


def test_no_condition_takes_a_plain_value_to_the_target(tmp_path: Path) -> None:
    """The condition of a resync, and the borders of chunks, go by columns that are unchanged."""
    _, mapping = load(config(tmp_path, f"{{{HASHED}}}"))
    made = next(iter(resolved(mapping)))
    columns = [source_column("id"), source_column("email")]
    there = target_relation(["id", "email"])
    assert unchanged_columns(columns, made, there) == {"id": "id"}


def test_another_type_of_the_input_is_refused(tmp_path: Path) -> None:
    _, mapping = load(config(tmp_path, f"{{{HASHED}}}"))
    made = next(iter(resolved(mapping)))
    resync = run("resync", "t")
    check_input_types(made, {"email": "character varying(9)"}, {"email": "text"}, resync)
    check_input_types(made, {}, {"email": "text"}, resync)
    with pytest.raises(MappingError, match="from character") as error:
        check_input_types(made, {"email": "character(9)"}, {"email": "text"}, resync)
    assert error.value.hint == "run: streamer resync t"


def test_binary_transport_takes_hashes_of_texts_only(tmp_path: Path) -> None:
    _, mapping = load(config(tmp_path, f"{{{HASHED}}}"))
    made = next(iter(resolved(mapping)))
    for oid, obstacle in [(1043, None), (2950, "streamer hashes its text")]:
        columns = (Column("id", 25, -1, True), Column("email", oid, -1, False))
        there = Relation(1, "public", "t", "d", columns)
        found = binary_obstacle(
            there,
            made,
            target_relation(["id", "email"]),
            types=binary_types(18_00_00, 18_00_00),
            type_names={},
        )
        assert (found or "").endswith(obstacle or "")
        assert (found is None) == (obstacle is None)


def test_a_plan_refuses_a_column_that_cannot_be_hashed(tmp_path: Path) -> None:
    _, mapping = load(config(tmp_path, f"{{{HASHED}}}"))
    made = next(iter(resolved(mapping)))
    for columns, key, there, problem in [
        (["id", "mail"], ["id"], target_column("mail"), "which the source does not send"),
        (["id", "email"], ["id"], target_column("email", "character varying(63)"), "cannot hold"),
    ]:
        target = target_relation(["id", there], unique_keys=[tuple(key)])
        with pytest.raises(MappingError, match=problem):
            make_plan(relation(columns, key), made, target, primary_key=tuple(key))
