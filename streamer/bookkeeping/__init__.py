"""The tables of the schema `streamer` in the target, which survive this process."""
