"""One micro-batch on one worker: how it is loaded, seeded, computed, folded into nodes, and what it may not do."""
