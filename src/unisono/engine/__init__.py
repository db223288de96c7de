"""A step and its sum, and how they survive the loss of a worker."""
