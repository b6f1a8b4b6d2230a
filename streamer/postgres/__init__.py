"""PostgreSQL code for both sides: quoting, sessions, SQLSTATE, connection strings."""
