"""The publishing side: its catalogs, the objects of streamer there, and the stream of changes."""
