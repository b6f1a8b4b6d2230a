"""A source's changes on disk, durable, while the target cannot take them.

runtime/wal_retention/writer.py  reads the slot
  → gather.py         messages to records, cut at commits
  → records.py        records to bytes, with a checksum each
  → files.py          bytes to segment files, flushed in groups; then acknowledged
  → stream.py         the pipeline reads flushed records, as if the source sent them
"""
