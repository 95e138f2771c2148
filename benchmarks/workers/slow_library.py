"""Stands for a large framework on a network file system: importing it takes 5 s (10-30 s are seen in practice)."""

import time

time.sleep(5)
