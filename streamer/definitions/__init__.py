"""Definitions of tables: read at one server, translated through the mapping, rendered as SQL."""
