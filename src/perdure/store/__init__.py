"""Durable things: the event log."""
