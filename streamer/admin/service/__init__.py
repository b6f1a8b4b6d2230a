"""The operations of API, page and command line on the mapping and on sources."""
