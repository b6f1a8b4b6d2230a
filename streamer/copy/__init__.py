"""The bulk copy of tables, beside the stream: snapshot, Spark job, hand-over."""
