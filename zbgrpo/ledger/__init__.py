"""The ledger: which group is where, who may generate next, what is trained when. Pure state, no sockets, no clock."""
