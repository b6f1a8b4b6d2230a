"""The objects that streamer uses at a source: slot and publications."""
