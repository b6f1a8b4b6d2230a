"""Metrics, logs and health checks for operators."""
