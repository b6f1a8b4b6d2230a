"""``streamer doctor``: what is wrong and what to do, and everything about it in one file."""
