"""The operator's HTTP API."""
