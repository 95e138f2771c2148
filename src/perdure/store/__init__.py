"""Durable things: the event log, and checkpoints in storage."""
