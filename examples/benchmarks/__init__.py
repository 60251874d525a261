"""Benchmarks: run one with ``python -m examples.benchmarks.NAME``."""
