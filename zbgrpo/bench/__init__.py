"""Benchmarks, and the task and model that the quickstart and the benchmarks run on. Each figure comes with its own baseline."""
