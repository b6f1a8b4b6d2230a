"""The health of the process: gauges, readiness, logs of problems and waits."""
