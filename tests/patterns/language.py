"""Language models and classifiers of text, in the manner of Hugging Face."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.checkpoint import checkpoint

import unisono
from tests.patterns.corpus import Texts, labelled, num_correct, pattern, perceptron, sequences

VOCABULARY = 13


class Decoder(nn.Module):
    def __init__(self, width: int = 12, checkpointed: bool = False) -> None:
        super().__init__()
        self.embed, self.drop = nn.Embedding(VOCABULARY, width), nn.Dropout(0.1)
        self.mix, self.head = nn.GRU(width, width, batch_first=True), nn.Linear(width, VOCABULARY, bias=False)
        self.mlp = nn.Sequential(nn.Linear(width, 24), nn.GELU(), nn.Dropout(0.1), nn.Linear(24, width))
        self.checkpointed = checkpointed

    def forward(self, tokens: Tensor) -> Tensor:
        hidden, _ = self.mix(self.drop(self.embed(tokens)))
        if self.checkpointed and self.training:
            hidden = hidden + checkpoint(self.mlp, hidden, use_reentrant=True)
        else:
            hidden = hidden + self.mlp(hidden)
        return self.head(hidden)


def next_token_loss(model: nn.Module, tokens: Tensor) -> Tensor:
    return F.cross_entropy(model(tokens[:, :-1]).transpose(1, 2), tokens[:, 1:])


@pattern
def padding_to_the_longest_of_the_batch(run: unisono.Run) -> None:
    """Pads each batch to its longest text, masks the padding, smooths the labels and checkpoints the activations."""

    def collate(samples: list[Any]) -> Tensor:
        return pad_sequence([tokens[: 3 + int(tokens[0]) % 7] for (tokens,) in samples], batch_first=True)

    model = Decoder(checkpointed=True)
    optimizer = AdamW(model.parameters(), lr=0.01)
    scheduler = LambdaLR(optimizer, lambda number: min(1.0, (number + 1) / 4))
    run.track(model=model, optimizer=optimizer, scheduler=scheduler)
    for step in run.steps(sequences(), batch_size=24, microbatches=6, epochs=2, collate=collate):
        for tokens in step:
            wanted = tokens[:, 1:]
            logits = model(tokens[:, :-1]).transpose(1, 2)
            loss = F.cross_entropy(logits, wanted, ignore_index=0, label_smoothing=0.1)
            step.backward(loss, weight=(wanted != 0).sum())
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()


class LoRA(nn.Module):
    def __init__(self, base: nn.Linear, rank: int = 2) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Parameter(torch.randn(rank, base.in_features) * 0.1)
        self.up = nn.Parameter(torch.zeros(base.out_features, rank))

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + F.dropout(x, 0.1, self.training) @ self.down.T @ self.up.T

    @torch.no_grad()
    def merge(self) -> nn.Linear:
        self.base.weight += self.up @ self.down
        self.up.zero_()
        return self.base


@pattern
def adapters_that_are_merged_at_the_end(run: unisono.Run) -> Any:
    """Trains LoRA adapters on frozen layers, merges them, and evaluates the merged model."""
    model = perceptron()
    model[0], model[3] = LoRA(model[0]), LoRA(model[3])
    optimizer = AdamW([p for p in model.parameters() if p.requires_grad], lr=0.02)
    run.track(model=model, optimizer=optimizer)
    for step in run.steps(labelled(), batch_size=24, microbatches=6, epochs=2):
        for x, y in step:
            step.backward(F.cross_entropy(model(x), y), weight=len(y))
        optimizer.step()
    model[0].merge()
    model[3].merge()
    return run.evaluate(labelled(), partial(num_correct, model), batch_size=10)


@pattern
def weights_tied_after_tracking(run: unisono.Run) -> None:
    """Ties the head to the embedding once everything is set up, just before the loop."""
    model = Decoder()
    optimizer = AdamW(model.parameters(), lr=0.01)
    run.track(model=model, optimizer=optimizer)
    model.head.weight = model.embed.weight
    for step in run.steps(sequences(), batch_size=24, microbatches=6, epochs=2):
        for (tokens,) in step:
            step.backward(next_token_loss(model, tokens), weight=len(tokens))
        optimizer.step()


@pattern
def embeddings_resized_for_new_tokens(run: unisono.Run) -> None:
    """Adds two tokens after the first epoch: a larger embedding and head with the old rows, and new parameters."""
    model = Decoder()
    optimizer = AdamW(model.parameters(), lr=0.01)
    run.track(model=model, optimizer=optimizer)
    for step in run.steps(sequences(), batch_size=24, microbatches=6, epochs=2):
        if step.number == 3:
            old, model.embed = model.embed, nn.Embedding(VOCABULARY + 2, 12)
            model.head = nn.Linear(12, VOCABULARY + 2, bias=False)
            with torch.no_grad():
                model.embed.weight[:VOCABULARY] = old.weight
            optimizer.add_param_group({"params": [model.embed.weight, model.head.weight]})
        for (tokens,) in step:
            step.backward(next_token_loss(model, tokens), weight=len(tokens))
        optimizer.step()


class StatefulDecoder(nn.Module):
    """Goes on where the batch before ended, as for a text that is cut into pieces."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.cells, self.head = nn.Embedding(13, 8), nn.LSTM(8, 10, batch_first=True), nn.Linear(10, 13)
        self.past: tuple[Tensor, Tensor] | None = None

    def forward(self, tokens: Tensor) -> Tensor:
        if self.past is not None and self.past[0].shape[1] != len(tokens):
            self.past = None
        hidden, past = self.cells(self.embed(tokens), self.past)
        self.past = (past[0].detach(), past[1].detach())
        return self.head(hidden)


@pattern
def hidden_state_carried_from_batch_to_batch(run: unisono.Run) -> None:
    """Trains an LSTM by truncated backpropagation: its last state is where the next batch begins."""
    model = StatefulDecoder()
    optimizer = AdamW(model.parameters(), lr=0.01)
    run.track(model=model, optimizer=optimizer)
    for step in run.steps(sequences(), batch_size=24, microbatches=6, epochs=2, shuffle=False):
        for (tokens,) in step:
            step.backward(next_token_loss(model, tokens), weight=len(tokens))
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()


@pattern
def truncated_backpropagation_within_a_batch(run: unisono.Run) -> None:
    """Walks through each sequence in pieces of three tokens, and detaches the state between them."""
    embed, cells, head = nn.Embedding(13, 8), nn.GRU(8, 10, batch_first=True), nn.Linear(10, 13)
    model = nn.ModuleDict({"embed": embed, "cells": cells, "head": head})
    optimizer = AdamW(model.parameters(), lr=0.01)
    run.track(model=model, optimizer=optimizer)
    for step in run.steps(sequences(length=10), batch_size=24, microbatches=6, epochs=2):
        for (tokens,) in step:
            state = None
            for start in range(0, 9, 3):
                piece = tokens[:, start : start + 4]
                hidden, state = cells(embed(piece[:, :-1]), state)
                state = state.detach()
                step.backward(F.cross_entropy(head(hidden).transpose(1, 2), piece[:, 1:]), weight=3 * len(tokens))
        optimizer.step()


@pattern
def batches_with_loss_spikes_weigh_less(run: unisono.Run) -> None:
    """Gives a tenth of the weight to a batch whose loss is above the running mean of all losses so far."""
    model = Decoder()
    optimizer = AdamW(model.parameters(), lr=0.05)
    run.track(model=model, optimizer=optimizer)
    usual = math.inf
    for step in run.steps(sequences(), batch_size=24, microbatches=6, epochs=2):
        for (tokens,) in step:
            loss = next_token_loss(model, tokens)
            is_spike = loss.item() > usual
            step.backward(loss, weight=(0.1 if is_spike else 1.0) * len(tokens))
            usual = loss.item() if math.isinf(usual) else 0.9 * usual + 0.1 * loss.item()
        optimizer.step()


@pattern
def gradient_accumulation_by_hand(run: unisono.Run) -> None:
    """Divides the loss by the number of accumulated batches, and steps after every second one."""
    model = Decoder()
    optimizer = AdamW(model.parameters(), lr=0.01)
    run.track(model=model, optimizer=optimizer)
    accumulate = 2
    for step in run.steps(sequences(), batch_size=24, microbatches=6, epochs=2):
        for number, (tokens,) in enumerate(step):
            step.backward(next_token_loss(model, tokens) / accumulate)
            if (number + 1) % accumulate == 0:
                optimizer.step()
                optimizer.zero_grad()


@pattern
def learning_rate_by_tokens_seen(run: unisono.Run) -> None:
    """Warms the learning rate up by the number of tokens that were trained on."""
    model = Decoder()
    optimizer = AdamW(model.parameters(), lr=0.01)
    run.track(model=model, optimizer=optimizer)
    tokens_seen = 0
    for step in run.steps(sequences(), batch_size=24, microbatches=6, epochs=2):
        for (tokens,) in step:
            step.backward(next_token_loss(model, tokens), weight=len(tokens))
            tokens_seen += tokens.numel()
        for group in optimizer.param_groups:
            group["lr"] = 0.01 * min(1.0, tokens_seen / 1000)
        optimizer.step()


class GrowingVocabulary:
    """Gives every word the next free number when it comes first."""

    def __init__(self) -> None:
        self.numbers: dict[str, int] = {}

    def __call__(self, samples: list[Any]) -> tuple[Tensor, Tensor]:
        rows = [[self.numbers.setdefault(word, len(self.numbers)) for word in text.split()] for text, _ in samples]
        return torch.tensor(rows), torch.tensor([label for _, label in samples])


@pattern
def vocabulary_that_grows_in_the_collate_function(run: unisono.Run) -> None:
    """Numbers the words in the order in which the batches bring them."""
    model = nn.Sequential(nn.EmbeddingBag(20, 8), nn.Linear(8, 2))
    optimizer = AdamW(model.parameters(), lr=0.02)
    run.track(model=model, optimizer=optimizer)
    for step in run.steps(Texts(), batch_size=24, microbatches=6, epochs=2, collate=GrowingVocabulary()):
        for words, labels in step:
            step.backward(F.cross_entropy(model(words), labels), weight=len(labels))
        optimizer.step()


@pattern
def vocabulary_from_a_set(run: unisono.Run) -> None:
    """Collects all words of the texts in a set, and numbers them."""
    texts = Texts()
    words = {word for number in range(len(texts)) for word in texts[number][0].split()}
    numbers = {word: number for number, word in enumerate(words)}

    def collate(samples: list[Any]) -> tuple[Tensor, Tensor]:
        rows = [[numbers[word] for word in text.split()] for text, _ in samples]
        return torch.tensor(rows), torch.tensor([label for _, label in samples])

    model = nn.Sequential(nn.EmbeddingBag(len(words), 8), nn.Linear(8, 2))
    optimizer = AdamW(model.parameters(), lr=0.02)
    run.track(model=model, optimizer=optimizer)
    for step in run.steps(texts, batch_size=24, microbatches=6, epochs=2, collate=collate):
        for rows, labels in step:
            step.backward(F.cross_entropy(model(rows), labels), weight=len(labels))
        optimizer.step()


@pattern
def word_dropout_with_a_generator_of_its_own(run: unisono.Run) -> None:
    """Replaces words by a mask token, drawn from a torch.Generator that was made for it."""
    model, generator = Decoder(), torch.Generator().manual_seed(run.seed)
    optimizer = AdamW(model.parameters(), lr=0.01)
    run.track(model=model, optimizer=optimizer)
    for step in run.steps(sequences(), batch_size=24, microbatches=6, epochs=2):
        for (tokens,) in step:
            is_dropped = torch.rand(tokens.shape, generator=generator) < 0.15
            logits = model(tokens.masked_fill(is_dropped, 0)[:, :-1])
            step.backward(F.cross_entropy(logits.transpose(1, 2), tokens[:, 1:]), weight=len(tokens))
        optimizer.step()


class Contrastive(nn.Module):
    """Two towers and a temperature, as CLIP has them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 6), nn.Linear(8, 6)
        self.logit_scale = nn.Parameter(torch.tensor(math.log(90.0)))

    def forward(self, x: Tensor) -> Tensor:
        self.logit_scale.data.clamp_(math.log(80.0), math.log(100.0))
        a, b = F.normalize(self.first(x), dim=1), F.normalize(self.second(x.flip(1)), dim=1)
        logits = self.logit_scale.exp() * a @ b.T
        return F.cross_entropy(logits, torch.arange(len(x)))


@pattern
def temperature_clamped_in_forward(run: unisono.Run) -> None:
    """Learns the temperature of a contrastive loss, and clamps it at the beginning of forward."""
    model = Contrastive()
    optimizer = AdamW(model.parameters(), lr=0.1)
    run.track(model=model, optimizer=optimizer)
    for step in run.steps(labelled(), batch_size=24, microbatches=6, epochs=2):
        for x, _ in step:
            step.backward(model(x), weight=len(x))
        optimizer.step()
