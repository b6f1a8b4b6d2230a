"""The tables of a source while it streams: their lanes, states, events and obstacles."""
