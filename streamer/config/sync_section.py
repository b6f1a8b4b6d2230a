"""The settings of copies and comparisons: the section ``sync``."""

import re
from typing import Annotated, Any, Final

from pydantic import BeforeValidator, Field

from streamer.config.connection_settings import Strict
from streamer.config.size_setting import Size

_SECRET_NAME: Final = re.compile("(?i)secret|password|token|access.?key")


def _check_spark_settings(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    for name, setting in value.items():
        if not str(name).startswith("spark."):
            raise ValueError(f'"{name}" is not a Spark setting: their names begin with "spark."')
        if _SECRET_NAME.search(str(name)) or re.search("://.*@", str(setting)):
            raise ValueError(
                f'"{name}" would be visible in process lists; write it to spark-defaults.conf in '
                "the directory that SPARK_CONF_DIR names, with mode 0600"
            )
    return {
        name: str(setting).lower() if isinstance(setting, bool) else str(setting)
        for name, setting in value.items()
        if setting is not None
    }


class SyncSection(Strict):
    """``sync``"""

    spark_master: str = Field(
        default="local[*]",
        description="The Spark master that runs copies: `local[*]` or `local[N]` for a separate "
        "process on this machine, or the URL of a cluster.",
    )
    spark_settings: Annotated[
        dict[str, str],
        BeforeValidator(
            _check_spark_settings,
            json_schema_input_type=dict[
                Annotated[str, Field(pattern=r"^spark\.")], str | float | bool | None
            ],
        ),
    ] = Field(
        default={},
        description="Further Spark settings by name, such as `{spark.executor.memory: 1g}`. "
        "streamer rejects secrets here, because Spark passes these settings on command lines; put "
        "them into Spark's own `spark-defaults.conf`.",
    )
    allow_insecure_spark: bool = Field(
        default=False,
        description="Send connection strings even through a cluster that does not "
        "authenticate clients or encrypt connections.",
    )
    jobs: int = Field(
        default=4,
        ge=1,
        le=256,
        description="COPY pairs that run at the same time. Each pair uses one connection to "
        "the source and one to the target.",
    )
    rows_per_second: float | None = Field(
        default=None,
        gt=0,
        description="Rows per second that all copies together read from a source. Not set: no "
        "limit.",
    )
    total_rows_per_second: float | None = Field(
        default=None,
        gt=0,
        description="Rows per second that the copies of all sources together read, over all "
        "processes. Not set: no limit.",
    )
    total_bytes_per_second: Size | None = Field(
        default=None,
        gt=0,
        description="Bytes per second that the copies of all sources together pass on, over all "
        "processes, such as `50 MB`. Not set: no limit.",
    )
    sources_at_once: int = Field(
        default=4,
        ge=1,
        le=1000,
        description="Sources whose first copies run at the same time. The remaining sources wait "
        "without slot and snapshot. Sources of a higher `priority` come first, then sources with "
        "less to copy. "
        "Tables that join later, and resyncs, have a separate limit of the same size.",
    )
    sources_per_server: int | None = Field(
        default=None,
        ge=1,
        le=1000,
        description="Sources of a PostgreSQL server that copy at the same time, first copies and "
        "later copies together. Sources of other servers do not wait for them. Not set: only "
        "`sync.sources_at_once` counts.",
    )
    resumable_above: Size = Field(
        default=10 << 30,
        description="Size above which streamer copies a table in chunks. After an "
        "interruption, such a copy continues after its last finished chunk.",
    )
    compare_on_spark_above: Size = Field(
        default=1 << 30,
        description="Total size of the compared tables above which a comparison runs on a local "
        "Spark. A smaller comparison runs in a single Python process, because Spark takes seconds "
        "to start. 0: always on Spark. With a Spark cluster, every comparison runs there.",
    )
    defer_indexes: bool = Field(
        default=True,
        description="Drop the primary key and indexes of an empty target table during its copy and "
        "re-create them afterwards. A table of another owner keeps its indexes.",
    )
