"""The publisher: catalogs of the source, streamer's objects at the source, and the stream of
changes.
"""
