"""The state of a run on one worker: what is tracked, its buffers, and how it is packed, compared and digested."""
