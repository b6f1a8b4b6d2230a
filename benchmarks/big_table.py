"""The large table of some benchmarks."""

from streamer.commands.demo.embedded_servers import Server


def create(key_type: str = "bigint") -> str:
    """Return the statement that creates the empty table."""
    return (
        f"create table big (id {key_type} primary key, customer int, at timestamptz,"
        " amount numeric(12,2), note text)"
    )


def fill(server: Server, rows: int, database: str = "bench") -> None:
    """Write the same rows to every server, and leave no work for autovacuum."""
    server.execute(
        "insert into big select g, g % 10000, '2026-01-01'::timestamptz + g * interval '1 second',"
        f" g * 0.25, md5(g::text) from generate_series(1, {rows}) g",
        database,
    )
    server.execute("vacuum (freeze, analyze) big", database)
