"""``streamer cutover``: programs go over from a source to the target, step by step."""
