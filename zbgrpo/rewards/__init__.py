"""Scores of responses: extraction, equality, the user's own functions, and the pool of processes that runs them."""
