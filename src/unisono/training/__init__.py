"""A run inside a worker: the script's interface, and a step from its micro-batches to its commit."""
