"""``streamer cutover``: moves programs from a source to the target, step by step."""
