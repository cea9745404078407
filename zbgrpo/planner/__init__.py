"""Predicts a run from a few rates, and finds the split of ranks and the batch sizes that leave the least bubble."""
