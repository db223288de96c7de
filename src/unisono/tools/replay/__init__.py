"""`unisono replay`: steps of a run, computed again."""
