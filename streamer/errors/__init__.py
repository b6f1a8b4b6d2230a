"""Errors, their stored form, and their remedies as data. Pure."""
