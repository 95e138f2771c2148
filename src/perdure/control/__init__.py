"""Runs once per job: hears every node, decides, and publishes what each node is to do."""
