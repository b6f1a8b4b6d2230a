"""The subscriber: connections to the target, its catalogs, and the columns that streamer adds."""
