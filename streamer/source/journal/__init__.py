"""Stores a source's changes durably on disk while the target cannot apply them.

runtime/wal_retention/journal_writer.py  reads the slot
  → gather_records.py   messages to records, cut at commits
  → journal_records.py  records to bytes, with a checksum each
  → journal_files.py    bytes to segment files, flushed in groups; then acknowledged
  → journal_stream.py   the pipeline reads flushed records, as if the source sent them
"""
