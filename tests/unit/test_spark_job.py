"""The modules shipped to executors on remote machines are all that a task needs."""

import ast
import subprocess
import sys
from pathlib import Path

import psycopg

import streamer
from streamer.copy.spark.job import SHIPPED, write_shipped
from streamer.copy.spark.security import (
    choose_environment,
    find_defaults_file,
    find_weaknesses,
    is_local,
    parse_properties,
)
from streamer.postgres.conninfo import with_password_of


def test_shipped_modules_import_without_the_rest(tmp_path: Path) -> None:
    """With psycopg and no further package, also where a different version is installed."""
    archive = tmp_path / "tasks.zip"
    write_shipped(archive)
    packages = Path(psycopg.__file__).parent.parent
    program = f"""
import sys
sys.path[1:1] = [{str(archive)!r}]
sys.path.append({str(packages)!r})
import streamer.compare.unit_reader, streamer.copy.parts.part_copier
ours = sorted(name for name in sys.modules if name.split(".")[0] == "streamer")
assert all({str(archive)!r} in sys.modules[name].__file__ for name in ours), ours
others = {{"asyncpg", "structlog", "pydantic", "pyspark", "rich"}} & set(sys.modules)
assert not others, others
print(*ours)
"""
    result = subprocess.run(
        [sys.executable, "-I", "-c", program], check=False, capture_output=True, text=True, cwd="/"
    )
    assert result.returncode == 0, result.stderr
    assert tuple(result.stdout.split()) == SHIPPED


def test_only_tasks_in_the_drivers_own_process_are_local() -> None:
    masters = [
        "local",
        "local[*]",
        "local[2,4]",
        "local-cluster[2,1,512]",
        "spark://localhost:7077",
    ]
    assert [is_local(master) for master in masters] == [True, True, True, False, False]


def test_a_cluster_is_secure_when_it_authenticates_and_encrypts() -> None:
    both = {"spark.authenticate": "true", "spark.network.crypto.enabled": "True "}
    assert find_weaknesses(both) == []
    assert find_weaknesses({"spark.authenticate": "true", "spark.ssl.rpc.enabled": "true"}) == []
    (weakness,) = find_weaknesses({"spark.authenticate": "true"})
    assert "unencrypted" in weakness
    (weakness,) = find_weaknesses(both | {"spark.authenticate": "false"})
    assert "spark.authenticate is off" in weakness
    assert len(find_weaknesses({})) == 2


def test_the_defaults_file_is_read_as_spark_reads_it() -> None:
    text = "# a comment\n\nspark.authenticate true\n spark.a = b c \nspark.c:d\n!x y\n"
    assert parse_properties(text) == {
        "spark.authenticate": "true",
        "spark.a": "b c",
        "spark.c": "d",
    }
    assert str(find_defaults_file({}, "/opt/spark")) == "/opt/spark/conf/spark-defaults.conf"
    given = {"SPARK_HOME": "/else", "SPARK_CONF_DIR": "/etc/spark"}
    assert str(find_defaults_file(given, "/opt/spark")) == "/etc/spark/spark-defaults.conf"


def test_spark_gets_the_variables_it_reads_and_no_passwords() -> None:
    passed = {"PATH": "/bin", "JAVA_HOME": "/java", "PGSSLROOTCERT": "/ca", "SPARK_CONF_DIR": "/c"}
    kept = {"DW_PASSWORD": "x", "PGPASSWORD": "x", "STREAMER_TARGET__URL": "x", "AWS_SECRET": "x"}
    assert choose_environment(passed | kept) == passed


def test_each_child_process_for_rows_gets_the_chosen_variables_only() -> None:
    """Not so: processes of `run` itself, and commands of the operator, which may need all. The JVM
    has the variables of its driver.
    """
    package = Path(streamer.__file__).parent
    starts = ("run", "Popen", "create_subprocess_exec", "create_subprocess_shell")
    passed = {}
    for path in sorted(set(package.rglob("*.py")) - {package / "copy/spark/jvm.py"}):
        folder = path.relative_to(package).parts[0]
        for call in ast.walk(ast.parse(path.read_text())):
            if (
                isinstance(call, ast.Call)
                and folder
                in ("apply", "compare", "copy", "drain", "schema_changes", "source", "target")
                and ast.unparse(call.func).startswith(("subprocess.", "asyncio.create", "create_"))
                and ast.unparse(call.func).rpartition(".")[2] in starts
            ):
                environment = [ast.unparse(k.value) for k in call.keywords if k.arg == "env"]
                passed[f"{path.name}:{call.lineno}"] = environment
    assert len(passed) >= 5
    chosen = ("choose_environment(", "_environment(")
    assert not [
        at for at, environment in passed.items() if not str(environment)[2:].startswith(chosen)
    ]


def test_a_password_that_only_the_environment_holds_goes_into_the_job() -> None:
    environment = {"PGPASSWORD": "it's"}
    with_it = with_password_of(environment, "postgresql://me@db/shop?sslmode=require")
    assert psycopg.conninfo.conninfo_to_dict(with_it) == {
        "user": "me",
        "host": "db",
        "dbname": "shop",
        "sslmode": "require",
        "password": "it's",
    }
    for url in ("postgresql://me:own@db/shop", "service=shop"):
        assert with_password_of(environment, url) == url
    assert with_password_of({}, "host=db") == "host=db"
