"""Tests of a user, with the fixture of the plugin."""

from __future__ import annotations

from unisono.testing import Faults, SameBits


def test_the_bits(same_bits: SameBits) -> None:
    same_bits("train.py", workers=(1, 3), steps=20, golden="train", arguments=["--epochs", 1])
    same_bits(train, kill=Faults().kill("w1", step=3, at="after_backward"), arguments=[0.1], timeout_s=60)


def train(rate: float) -> float:
    return rate
