"""Optimizers whose state is cut over the workers."""
