"""The image: the steps of its Dockerfile, and the program from its wheel. `make image` runs it."""
