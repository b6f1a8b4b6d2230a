"""Configuration: process settings, and the mapping of the configuration file."""
