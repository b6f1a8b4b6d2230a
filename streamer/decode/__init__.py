"""Decodes the bytes of pgoutput to changes, grouped by transaction. Pure."""
