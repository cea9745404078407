"""How groups travel: from a producer to the hub, and from the hub through a shared-memory ring to the consumers.

`ring` is the memory of the last hop and its bookkeeping, without any I/O of its own; the descriptors that make a
record visible to a reader travel on a socket, so that the kernel orders them after the bytes they describe.
"""
