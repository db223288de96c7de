"""Measurements of the library against others. Each is run by hand: ``python -m benchmarks.step_time --help``."""
