"""Changes to rows of the target, committed together with their progress."""
