"""``streamer export --dbt``: reads the target's replicated tables, and writes a dbt package."""

from pathlib import Path

from streamer.bookkeeping.bookkeeping import Bookkeeping
from streamer.bookkeeping.bookkeeping_schema import is_installed
from streamer.bookkeeping.relation_records import read_relation_records
from streamer.bookkeeping.sources import read_source_records
from streamer.commands.dbt_package import MARK, DbtPackage, ReplicatedTable, dbt_package
from streamer.errors.error_classes import SettingsError
from streamer.mapping.relation_names import RelationName, parse_name
from streamer.mapping.rules import Mapping, TableRule, find_rules
from streamer.target.catalog import read_relations
from streamer.target.connection import TargetAddress


async def export_dbt(address: TargetAddress, mapping: Mapping, directory: Path) -> DbtPackage:
    """Write the package about all replicated tables to *directory*.

    Raises TargetError, MappingError, SettingsError.
    """
    package = dbt_package(await _read_tables(address, mapping))
    write_package(package, directory)
    return package


async def _read_tables(address: TargetAddress, mapping: Mapping) -> list[ReplicatedTable]:
    """Return the existing target tables that mapping and bookkeeping name."""
    bookkeeping = Bookkeeping(address, "streamer export")
    try:
        writers: dict[RelationName, dict[str, TableRule]] = {}
        if await is_installed(bookkeeping):
            writers = await _read_writers(bookkeeping, mapping)
        async with bookkeeping.connection() as connection:
            relations = await read_relations(connection, list(writers))
    finally:
        await bookkeeping.close()
    return [
        ReplicatedTable(relation, next(iter(writers[name].values())), tuple(sorted(writers[name])))
        for name, relation in relations.items()
    ]


async def _read_writers(
    bookkeeping: Bookkeeping, mapping: Mapping
) -> dict[RelationName, dict[str, TableRule]]:
    """Return the sources of each target table, by label, with their rules.

    A rule with a pattern does not name its tables, so the tables come from the bookkeeping.
    """
    sources = {source.label: source for source in mapping.sources}
    labels = {s.source_id: s.label for s in await read_source_records(bookkeeping)}
    writers: dict[RelationName, dict[str, TableRule]] = {}
    for record in await read_relation_records(bookkeeping):
        label = labels[record.source_id]
        if label in sources:
            for rule in find_rules(sources[label], [parse_name(record.source)]).values():
                writers.setdefault(parse_name(record.target), {})[label] = rule
    return writers


def write_package(package: DbtPackage, directory: Path) -> None:
    """Write the files of *package*, and remove files of an earlier export that the package lacks.

    Raises SettingsError before the first change if a file that streamer did not write has the same
    name.
    """
    try:
        for name in package.files:
            _require_own(directory / name)
        former = [path for path in directory.glob("*/*") if _is_own(path)]
        for name, text in package.files.items():
            path = directory / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        for path in former:
            if str(path.relative_to(directory)) not in package.files:
                path.unlink()
    except OSError as exc:
        raise SettingsError(f"--dbt {directory}: {exc.filename}: {exc.strerror}") from None


def _require_own(path: Path) -> None:
    if path.exists() and not _is_own(path):
        raise SettingsError(
            f"--dbt: {path} is not from `streamer export --dbt`",
            hint="name a new directory, or move the file",
        )


def _is_own(path: Path) -> bool:
    """Whether an earlier export wrote the file at *path*."""
    if not path.is_file():
        return False
    with path.open(encoding="utf-8", errors="replace") as file:
        return MARK in file.readline()
