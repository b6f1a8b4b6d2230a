"""Which table goes where: rules of the mapping, expressions of filter and set, options of a resync.

Pure.
"""
