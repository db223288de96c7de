"""Planning a run before it begins: what is measured of its first steps, and what is told of it."""
