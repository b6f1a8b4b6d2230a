"""Definitions of tables: messages about them, the difference of two, and their SQL. Pure."""
