"""Metrics, decision log, structured logs."""
