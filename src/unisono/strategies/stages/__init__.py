"""Models that are cut into stages, which the workers of a group carry: pipeline parallelism with the same bits."""
