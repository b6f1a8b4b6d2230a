"""What operators see: metrics, logs, health."""
