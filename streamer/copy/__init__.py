"""The bulk copy of tables, beside the stream: snapshot, Spark job, switch to streaming."""
