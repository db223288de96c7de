"""Values and rules that everything shares: no I/O, no clock, no torch."""
