"""The server behind a url of a source: primary, timeline, clock, encoding, limits of waits."""
