"""Which worker computes wrong values."""
