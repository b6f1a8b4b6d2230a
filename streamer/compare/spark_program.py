"""The Spark program of a comparison: ranges of all tables and sources, reduced; rows, joined.

`streamer.sync.spark.job` runs it for a job whose ``program`` is ``compare``. Its stages:

1. *digests of ranges*: a task computes both sides of a range. DataFrames reduce them to totals and
   to the ranges that differ.
2. *split*: tasks cut a large range that differs at keys, and its parts go through 1 again.
3. *rows*: hashes of those in small ranges that differ, from both sides. A full outer join by
   relation (a table of one source, so of one sid) and key leaves the keys whose rows differ;
4. *keys*: tasks read them on both sides until each has a judgement (`streamer.compare.judge`).
5. DataFrames count verdicts, sample them, and write the report.

The driver holds the ranges of the job and the counts of each table. Everything else stays with
the executors, which spill it to disk. Executors get connection strings as `spark_job` hands them.
"""

import json
from functools import partial, reduce
from pathlib import Path
from typing import Any, Final

from pyspark import RDD, SparkContext, StorageLevel
from pyspark.sql import Column, DataFrame, SparkSession, Window
from pyspark.sql import functions as f
from pyspark.sql import types as t

from streamer.compare.files import PARQUET, write_report, write_statements
from streamer.compare.parquet import write_parquet
from streamer.compare.ranges import FETCH_ROWS, SPLITS_MAX, count_partitions
from streamer.compare.readings import ERROR, SOURCE, TARGET, Unit
from streamer.compare.results import SAMPLE_ROWS, shown
from streamer.compare.tables import ComparedTable
from streamer.compare.tasks import (
    Ends,
    digest_units,
    fetch,
    judge_keys,
    split_units,
    units_of_rows,
)

RANGES_PER_TASK: Final = 8
SESSION_SETTINGS: Final = {
    # Python and the servers do the work: compiling a query takes longer than it saves.
    "spark.sql.codegen.wholeStage": "false",
    "spark.sql.adaptive.enabled": "false",
    "spark.sql.autoBroadcastJoinThreshold": "-1",
}

_BOUND: Final = t.ArrayType(t.StringType())
_DIGESTS: Final = t.StructType(
    [
        t.StructField("relation", t.LongType()),
        t.StructField("number", t.LongType()),
        t.StructField("lower", _BOUND),
        t.StructField("upper", _BOUND),
        t.StructField("bucket", t.LongType()),
        t.StructField("side", t.LongType()),
        t.StructField("rows", t.LongType()),
        t.StructField("first", t.StringType()),
        t.StructField("second", t.StringType()),
        t.StructField("error", t.StringType()),
    ]
)
_ROWS: Final = t.StructType(
    [
        t.StructField("relation", t.LongType()),
        t.StructField("side", t.LongType()),
        t.StructField("key", t.StringType()),
        t.StructField("row", t.StringType()),
    ]
)
_VERDICTS: Final = t.StructType(
    [
        t.StructField("relation", t.LongType()),
        t.StructField("key", t.StringType()),
        t.StructField("kind", t.StringType()),
        t.StructField("missing", t.LongType()),
        t.StructField("extra", t.LongType()),
        t.StructField("different", t.LongType()),
        t.StructField("columns", t.ArrayType(t.StringType())),
        t.StructField("source", t.StringType()),
        t.StructField("target", t.StringType()),
        t.StructField("lsn", t.StringType()),
    ]
)


def run(context: SparkContext, job: dict[str, Any], ends: Ends) -> list[dict[str, Any]]:
    """Compare the tables of *job*; return a result for each.

    *ends*: what tasks connect to, or the file that holds it.
    """
    session = SparkSession(context)
    return _Comparison(session, job, ends).run()


class _Comparison:
    def __init__(self, session: SparkSession, job: dict[str, Any], ends: Ends) -> None:
        self._session = session
        self._context = session.sparkContext
        self._tables = {row["relation_id"]: ComparedTable.from_json(row) for row in job["tables"]}
        self._units = [_unit(row) for row in job["units"]]
        self._ends = ends
        self._job = job
        self._ordered = [i for i, table in self._tables.items() if table.is_ordered]
        self._appended = [i for i, table in self._tables.items() if table.keeps_more]
        self._jobs = max(1, int(job["jobs"]))
        self._kept: list[DataFrame] = []
        for name, value in SESSION_SETTINGS.items():
            session.conf.set(name, value)

    def run(self) -> list[dict[str, Any]]:
        try:
            totals, differing = self._digest_all()
            if differing is None and not self._job["report"] and not self._job["sql"]:
                return self._results(totals, None)
            if differing is None:
                verdicts = self._session.createDataFrame([], _VERDICTS)
            else:
                verdicts = self._keep(self._judge(self._find_keys(differing)))
            self._describe("counts of verdicts")
            results = self._results(totals, verdicts)
            if report := self._job["report"]:
                self._describe("report")
                self._write_report(verdicts, Path(report))
            if sql := self._job["sql"]:
                self._describe("statements")
                self._write_statements(verdicts, Path(sql))
            return results
        finally:
            for frame in self._kept:
                frame.unpersist()

    def _describe(self, stage: str) -> None:
        self._context.setJobDescription(f"streamer compare: {stage}")

    def _slices(self, count: int) -> int:
        """Return the number of tasks for *count* ranges: each makes connections of its own."""
        return max(1, min(count, max(4 * self._jobs, count // RANGES_PER_TASK)))

    def _expect(self, rows: int) -> None:
        """Choose the number of partitions for the coming queries: most have few rows."""
        count = count_partitions(rows, self._jobs)
        self._session.conf.set("spark.sql.shuffle.partitions", str(count))

    def _keep(self, frame: DataFrame) -> DataFrame:
        """Compute *frame* once: a stage that is computed again would read the servers again."""
        kept = frame.persist(StorageLevel.DISK_ONLY)
        self._kept.append(kept)
        return kept

    # ---- 1 and 2: ranges -----------------------------------------------------------------------

    def _digest_all(self) -> tuple[dict[int, dict[str, Any]], DataFrame | None]:
        """Return rows and errors by table, and the small ranges that differ, if any."""
        self._describe(f"digests of {len(self._units)} ranges")
        units = self._context.parallelize(
            [unit.to_row() for unit in self._units], self._slices(len(self._units))
        )
        self._expect(sum(2 * self._tables[unit.relation_id].digest_rows for unit in self._units))
        digests = self._keep(self._digest(units, is_first=True))
        totals = self._totals(digests)
        small: list[DataFrame] = []
        small_rows = 0
        for step in range(SPLITS_MAX):
            found = self._keep(_differing(digests, self._appended))
            is_large = f.col("relation").isin(self._ordered) & (f.col("rows") > FETCH_ROWS)
            if step == SPLITS_MAX - 1:
                is_large = f.lit(False)
            count, rows = _count_large(found, is_large)
            small.append(found.where(~is_large))
            small_rows += rows
            if not count:
                break
            self._describe(f"digests of parts of {count} ranges")
            large = found.where(is_large).rdd.mapPartitions(units_of_rows)
            split = large.repartition(min(count, 4 * self._jobs)).mapPartitions(
                partial(split_units, tables=self._tables, ends=self._ends)
            )
            digests = self._keep(self._digest(split.repartition(4 * self._jobs), is_first=False))
            for relation_id, error in self._errors(digests).items():
                totals[relation_id]["error"] = totals[relation_id]["error"] or error
        if not small_rows:
            return totals, None
        self._expect(2 * small_rows)
        return totals, reduce(DataFrame.union, small)

    def _digest(self, units: "RDD[Any]", *, is_first: bool) -> DataFrame:
        rows = units.mapPartitions(
            partial(
                digest_units,
                tables=self._tables,
                ends=self._ends,
                rows_per_second=self._job["rows_per_second"],
                comparison_id=self._job["comparison_id"],
                page_readers=self._job["page_readers"],
                is_first=is_first,
            )
        )
        return self._session.createDataFrame(rows, _DIGESTS)

    def _totals(self, digests: DataFrame) -> dict[int, dict[str, Any]]:
        """Return rows of both sides, and an error if there was one, by relation."""
        side = f.col("side")
        rows = digests.groupBy("relation").agg(
            f.sum(f.when(side == SOURCE, f.col("rows")).otherwise(0)).alias("rows_source"),
            f.sum(f.when(side == TARGET, f.col("rows")).otherwise(0)).alias("rows_target"),
            f.min("error").alias("error"),
        )
        return {row["relation"]: row.asDict() for row in rows.collect()}

    def _errors(self, digests: DataFrame) -> dict[int, str]:
        """Return an error of each relation that has one: no answer may leave it out."""
        failed = digests.where(f.col("error").isNotNull())
        found = failed.groupBy("relation").agg(f.min("error").alias("error")).collect()
        return {row["relation"]: row["error"] for row in found}

    # ---- 3: rows -------------------------------------------------------------------------------

    def _find_keys(self, differing: DataFrame) -> DataFrame:
        """Return relation and key of the rows that differ between two readings."""
        self._describe("rows of ranges that differ")
        # All buckets of a table are read by one query.
        units = (
            differing.groupBy("relation", "lower", "upper")
            .agg(f.collect_list("bucket").alias("buckets"))
            .withColumn("side", f.explode(f.array(f.lit(SOURCE), f.lit(TARGET))))
            .select("relation", "lower", "upper", "buckets", "side")
        )
        parts = units.rdd.map(tuple).repartition(4 * self._jobs)
        fetched = parts.mapPartitions(partial(fetch, tables=self._tables, ends=self._ends))
        rows = self._keep(self._session.createDataFrame(fetched, _ROWS))
        sides = []
        for side, name in ((SOURCE, "here"), (TARGET, "there")):
            gathered = f.sort_array(f.collect_list("row")).alias(name)
            sides.append(rows.where(f.col("side") == side).groupBy("relation", "key").agg(gathered))
        joined = sides[0].join(sides[1], ["relation", "key"], "full_outer")
        errors = rows.where(f.col("side") < 0).select("relation", "key", f.lit(True).alias("bad"))
        differ = joined.where(~f.col("here").eqNullSafe(f.col("there")))
        return differ.select("relation", "key", f.lit(False).alias("bad")).union(errors)

    # ---- 4: keys -------------------------------------------------------------------------------

    def _judge(self, keys: DataFrame) -> DataFrame:
        self._describe("keys that differ")
        parts = keys.rdd.map(tuple).repartition(self._jobs)
        verdicts = parts.mapPartitions(
            partial(
                judge_keys,
                tables=self._tables,
                ends=self._ends,
                seconds=self._job["seconds"],
                with_values=self._job["values"],
            )
        )
        return self._session.createDataFrame(verdicts, _VERDICTS)

    # ---- 5: results ----------------------------------------------------------------------------

    def _results(
        self, totals: dict[int, dict[str, Any]], verdicts: DataFrame | None
    ) -> list[dict[str, Any]]:
        counted: dict[int, dict[str, Any]] = {}
        samples: dict[int, list[dict[str, Any]]] = {}
        keys: dict[int, list[list[str]]] = {}
        if verdicts is not None:
            counted, samples = self._count(verdicts), self._sample(verdicts)
            if self._job.get("keys_max"):
                keys = self._find_keys_to_bring(verdicts)
        results = []
        for relation_id in self._tables:
            total = totals.get(relation_id, {})
            count = counted.get(relation_id, {})
            results.append(
                {
                    "relation_id": relation_id,
                    "rows_source": total.get("rows_source") or 0,
                    "rows_target": total.get("rows_target") or 0,
                    "error": total.get("error") or count.get("error"),
                    "sample": samples.get(relation_id, []),
                    "keys": keys.get(relation_id),
                    **{
                        name: count.get(name) or 0
                        for name in ("missing", "extra", "different", "undecided")
                    },
                }
            )
        return results

    def _count(self, verdicts: DataFrame) -> dict[int, dict[str, Any]]:
        """Return the numbers of rows that differ, and an error if there was one, by relation."""
        counts = verdicts.groupBy("relation").agg(
            *(f.sum(name).alias(name) for name in ("missing", "extra", "different")),
            f.sum(f.when(f.col("kind") == "undecided", 1).otherwise(0)).alias("undecided"),
            f.min(f.when(f.col("kind") == ERROR, f.col("key"))).alias("error"),
        )
        return {row["relation"]: row.asDict() for row in counts.collect()}

    def _sample(self, verdicts: DataFrame) -> dict[int, list[dict[str, Any]]]:
        ordered = Window.partitionBy("relation").orderBy("kind", "key")
        sampled = (
            verdicts.where(f.col("kind") != ERROR)
            .withColumn("place", f.row_number().over(ordered))
            .where(f.col("place") <= SAMPLE_ROWS)
            .orderBy("relation", "place")
        )
        samples: dict[int, list[dict[str, Any]]] = {}
        for row in sampled.collect():
            table = self._tables[row["relation"]]
            samples.setdefault(row["relation"], []).append(shown(table, row.asDict()))
        return samples

    def _find_keys_to_bring(self, verdicts: DataFrame) -> dict[int, list[list[str]]]:
        """Return the keys of rows that differ, of tables that have keys and not too many of them.

        They stay with the executors otherwise.
        """
        keyed = [i for i, table in self._tables.items() if table.key and table.key_types]
        differ = verdicts.where(f.col("kind").isin("missing", "extra", "different"))
        counts = differ.where(f.col("relation").isin(keyed)).groupBy("relation").count()
        few = counts.where(f.col("count") <= self._job["keys_max"]).select("relation")
        found: dict[int, list[list[str]]] = {}
        for row in differ.join(few, "relation").select("relation", "key").collect():
            found.setdefault(row["relation"], []).append(json.loads(row["key"]))
        return found

    def _write_report(self, verdicts: DataFrame, path: Path) -> None:
        """Write one file: Parquet, or a line of JSON for each row."""
        rows = verdicts.where(f.col("kind") != ERROR)
        if path.suffix == PARQUET:
            self._write_parquet(rows, path)
            return
        ordered = rows.orderBy("relation", "kind", "key").toLocalIterator()
        write_report(path, self._tables, (row.asDict() for row in ordered))

    def _write_statements(self, verdicts: DataFrame, path: Path) -> None:
        rows = verdicts.where(f.col("kind").isin("missing", "extra", "different"))
        ordered = rows.orderBy("relation", "key").toLocalIterator()
        write_statements(path, self._tables, (row.asDict() for row in ordered))

    def _write_parquet(self, rows: DataFrame, path: Path) -> None:
        names = self._session.createDataFrame(
            [
                (i, table.database, table.sid, table.source_name, table.target_name)
                for i, table in self._tables.items()
            ],
            "relation long, database string, sid string, table string, target_table string",
        )
        write_parquet(names.join(rows, "relation").drop("relation"), path)


def _unit(row: list[Any]) -> Unit:
    return Unit.from_row(row)


def _count_large(found: DataFrame, is_large: Column) -> tuple[int, int]:
    """Return how many ranges are large, and how many rows the others have."""
    row = found.agg(
        f.count(f.when(is_large, True)).alias("count"),
        f.sum(f.when(~is_large, f.col("rows"))).alias("rows"),
    ).first()
    assert row is not None
    return row["count"], row["rows"] or 0


def _differing(digests: DataFrame, appended: list[int]) -> DataFrame:
    """Reduce digests to the ranges and buckets whose sides differ. *appended*: tables of which the
    target may have more.
    """
    side = f.col("side")

    def of(number: int, name: str, default: Any) -> Any:
        return f.coalesce(f.max(f.when(side == number, f.col(name))), f.lit(default))

    both = (
        digests.where(f.col("error").isNull())
        .groupBy("relation", "number", "lower", "upper", "bucket")
        .agg(
            *(
                of(number, name, default).alias(f"{name}_{number}")
                for number in (SOURCE, TARGET)
                for name, default in (("rows", 0), ("first", "0"), ("second", "0"))
            )
        )
    )
    differ = [
        f.col(f"{name}_{SOURCE}") != f.col(f"{name}_{TARGET}")
        for name in ("rows", "first", "second")
    ]
    source_rows, target_rows = f.col(f"rows_{SOURCE}"), f.col(f"rows_{TARGET}")
    is_extra = f.col("relation").isin(appended) & (source_rows == 0)
    return both.where((differ[0] | differ[1] | differ[2]) & ~is_extra).select(
        "relation",
        "number",
        "lower",
        "upper",
        "bucket",
        f.greatest(source_rows, target_rows).alias("rows"),
        f.when(source_rows >= target_rows, SOURCE).otherwise(TARGET).alias("larger_side"),
    )
