"""Facts about the server that a source's url reaches: primary, timeline, clock, encoding, wait
limits.
"""
