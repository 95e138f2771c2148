"""Runs on every node: keeps its workers in step with control's orders, and tells what happens to them. No torch."""
