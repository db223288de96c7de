"""Mistakes that a user's type checker has to find, one a line."""

from __future__ import annotations

import unisono

run = unisono.Run(seed="7")  # expected: arg-type
run.step([1, 2])  # expected: attr-defined
for step in run.steps([1, 2, 3], batch_size=2):  # expected: call-arg
    step.number = 3  # expected: misc
policy: unisono.Checkpoints = unisono.Checkpoints(every=5)  # expected: call-arg
