"""Definitions of tables: messages, differences, and the SQL of definitions. Pure."""
