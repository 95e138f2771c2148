"""The nouns. Each is defined once, as a frozen value, and is the same object in memory, on the wire and in the log.

Nothing here knows a clock, a process, a socket or a file.
"""
