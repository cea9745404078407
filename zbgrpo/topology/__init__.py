"""Who is who: the environment of a process (`env`) and the role of every rank (`roles`). No torch."""
