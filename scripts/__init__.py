"""Tools for developers and the build."""
