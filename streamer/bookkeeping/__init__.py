"""The bookkeeping: tables of the schema `streamer` in the target, which outlive the process."""
