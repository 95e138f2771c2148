"""Checkpoints from inside the training process: one copy into a slot, and back. Needs torch; imported when used."""
