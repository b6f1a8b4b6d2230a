"""The mapping in an SQLite database: draft, revisions, plan, export, import."""
