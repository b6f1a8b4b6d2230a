"""The mapping in an SQLite database, the API and the page of the running process."""
