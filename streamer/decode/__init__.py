"""Bytes of pgoutput to changes, grouped by transaction. Pure."""
