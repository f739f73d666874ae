"""Benchmarks: rows measured in fresh processes, their tables and charts."""
