"""Ways to train besides the plain step: each a folder that the engine does not import."""
