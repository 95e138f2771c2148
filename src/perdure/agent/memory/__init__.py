"""The memory server: one process per node that keeps its trainers' checkpoints in memory, whoever dies."""
