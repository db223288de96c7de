"""Sequences that count in steps of three, and a small language model with dropout that learns them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import IterableDataset
from transformers import GPT2Config, GPT2LMHeadModel, TrainingArguments

NUMBERS = 16


def sequences(count: int, first: int = 0) -> list[dict[str, list[int]]]:
    """Sequences of different lengths, the first part of which is no label."""
    found = []
    for index in range(first, first + count):
        numbers = [(5 * index + 3 * place) % NUMBERS for place in range(4 + index % 7)]
        found.append({"input_ids": numbers, "labels": [-100] * (index % 3) + numbers[index % 3 :]})
    return found


class Lines(IterableDataset[Any]):
    """Rows that can only be iterated over.

    Args:
        share: of the rows that are given, each by chance; in an order by chance, if it is less than 1.
    """

    def __init__(self, rows: list[Any], share: float = 1.0) -> None:
        self.rows = rows
        self._share = share

    def __iter__(self) -> Iterator[Any]:
        count = len(self.rows)
        for place in torch.randperm(count).tolist() if self._share < 1 else range(count):
            if torch.rand(()) < self._share:
                yield self.rows[place]


def collate(rows: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
    """Pad the sequences of a micro-batch to the longest of them."""
    longest = max(len(row["input_ids"]) for row in rows)

    def padded(values: list[int], with_: int) -> list[int]:
        return values + [with_] * (longest - len(values))

    return {
        "input_ids": torch.tensor([padded(row["input_ids"], 0) for row in rows]),
        "attention_mask": torch.tensor([padded([1] * len(row["input_ids"]), 0) for row in rows]),
        "labels": torch.tensor([padded(row["labels"], -100) for row in rows]),
    }


def model(**options: Any) -> GPT2LMHeadModel:
    sizes = {"vocab_size": NUMBERS, "n_positions": 16, "n_embd": 16, "n_layer": 1, "n_head": 2}
    return GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0, **options))


def arguments(folder: Path, **options: Any) -> TrainingArguments:
    """Global batches of 12 sequences, in micro-batches of 2."""
    chosen = {
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 6,
        "per_device_eval_batch_size": 4,
        "learning_rate": 2e-2,
        "logging_steps": 2,
        "disable_tqdm": True,
        "report_to": "none",
        "dataloader_pin_memory": False,
        **options,
    }
    return TrainingArguments(str(folder), **chosen)


def accuracy(predicted: Any) -> dict[str, float]:
    """Of the next number, where it is a label."""
    labels = predicted.label_ids[:, 1:]
    is_right = (predicted.predictions[:, :-1] == labels)[labels != -100]
    return {"accuracy": float(is_right.mean())}


def most_likely(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return logits.argmax(-1)
