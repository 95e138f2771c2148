"""The command line: the only place that wires adapters. Decides nothing about recovery."""
