"""Benchmarks: tasks, scorers, and the adapter that lm-eval drives."""
