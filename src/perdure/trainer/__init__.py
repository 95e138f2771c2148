"""Runs inside the training process, or forks it. Threads only, never an event loop; importing it imports no torch."""
