"""The capture of changed definitions at a source (`ddl: capture`)."""
