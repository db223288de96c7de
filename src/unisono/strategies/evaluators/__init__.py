"""Evaluations that do not hold up training."""
