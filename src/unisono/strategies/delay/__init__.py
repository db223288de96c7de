"""Gradients that are applied some steps later."""
