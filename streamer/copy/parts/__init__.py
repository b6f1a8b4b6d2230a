"""The parts of a copy: cut from a table, and copied by tasks."""
