"""The objects that streamer has at a source: slot and publications."""
