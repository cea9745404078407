"""The running engine: the hub, the two role loops, and how a process starts and ends."""
