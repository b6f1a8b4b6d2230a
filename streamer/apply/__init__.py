"""Changes to rows of the target, committed together with the progress they stand for."""
