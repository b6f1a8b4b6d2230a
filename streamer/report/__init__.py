"""The facts of a fleet for operators, and the problems among them."""
