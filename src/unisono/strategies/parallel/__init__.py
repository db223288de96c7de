"""Layers that are cut into shards, which the workers of a group carry: tensor parallelism with the same bits."""
