"""What a run leaves on disk, and how it is read back after any interruption.

`folder` writes a folder as a whole or not at all, finds the newest one that is complete and keeps two runs apart;
`durable` is the writing underneath.
"""
