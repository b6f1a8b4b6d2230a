"""The present state for API and page: status, events, history, overview of the fleet."""
