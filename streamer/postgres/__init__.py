"""Facts about PostgreSQL that both sides share: quoting, sessions, SQLSTATE, connection strings."""
