"""Benchmarks, and the task and tiny model that they and the quickstart run on.

Every figure is a ratio measured in one run: each benchmark brings its own baseline.
"""
