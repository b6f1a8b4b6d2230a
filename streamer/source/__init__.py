"""The publishing side: its catalogs, our publication and slot there, and the stream of changes."""
