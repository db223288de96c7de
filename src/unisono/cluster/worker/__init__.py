"""A worker's connection to the head, and what travels on it."""
