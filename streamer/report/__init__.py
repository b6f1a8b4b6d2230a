"""The facts and the problems of a fleet, for operators."""
