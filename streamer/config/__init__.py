"""Configuration: process settings, and the mapping of static mode."""
