"""The subscribing side: connections, catalogs, and the parts of tables that streamer adds there."""
