"""Networks on graphs and on sound."""

from __future__ import annotations

import functools
import itertools
import random

import numpy
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Adam
from torch.utils.data import DataLoader, Dataset, TensorDataset

import unisono
from tests.patterns.corpus import labelled, pattern, perceptron, sequences

NUM_NODES = 56


class Graph:
    """Nodes with features and labels, and some edges at random."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(5)
        self.x, self.y = labelled(NUM_NODES).tensors
        self.edges = torch.randint(0, NUM_NODES, (2, 220), generator=generator)
        self.neighbours = [self.edges[1, self.edges[0] == node].tolist() or [node] for node in range(NUM_NODES)]

    @property
    def nodes(self) -> TensorDataset:
        return TensorDataset(torch.arange(NUM_NODES))


class MessagePassing(nn.Module):
    def __init__(self, width: int = 12) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, width), nn.Linear(2 * width, 3)

    def hidden(self, x: Tensor, edges: Tensor) -> Tensor:
        sent = F.relu(self.first(x))
        received = torch.zeros_like(sent).index_add_(0, edges[0], sent[edges[1]])
        degree = torch.zeros(len(x)).scatter_add_(0, edges[0], torch.ones(edges.shape[1])).clamp(min=1)
        return torch.cat([sent, received / degree[:, None]], 1)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        return self.second(self.hidden(x, edges))


@pattern
def random_edges_are_dropped(run: unisono.Run) -> None:
    """Passes messages over the whole graph with a random half of its edges, and trains on the nodes of the batch."""
    graph, model = Graph(), MessagePassing()
    optimizer = Adam(model.parameters(), lr=0.02)
    run.track(model=model, optimizer=optimizer)
    for step in run.steps(graph.nodes, batch_size=24, microbatches=6, epochs=2):
        for (nodes,) in step:
            edges = graph.edges[:, torch.rand(graph.edges.shape[1]) < 0.5]
            step.backward(F.cross_entropy(model(graph.x, edges)[nodes], graph.y[nodes]), weight=len(nodes))
        optimizer.step()


rng = numpy.random.default_rng(0)


def sample_neighbours(graph: Graph, nodes: Tensor, number: int = 3) -> Tensor:
    """Features of so many neighbours of each node, with replacement."""
    return torch.stack([graph.x[rng.choice(graph.neighbours[node], number)] for node in nodes.tolist()])


@pattern
def neighbours_sampled_by_a_generator_of_the_module(run: unisono.Run) -> None:
    """GraphSAGE: the mean over three sampled neighbours, drawn by the numpy Generator of the module."""
    graph, model = Graph(), perceptron(16, 3)
    optimizer = Adam(model.parameters(), lr=0.02)
    run.track(model=model, optimizer=optimizer)
    for step in run.steps(graph.nodes, batch_size=24, microbatches=6, epochs=2):
        for (nodes,) in step:
            around = sample_neighbours(graph, nodes).mean(1)
            logits = model(torch.cat([graph.x[nodes], around], 1))
            step.backward(F.cross_entropy(logits, graph.y[nodes]), weight=len(nodes))
        optimizer.step()


@pattern
def embeddings_of_earlier_batches(run: unisono.Run) -> None:
    """GNNAutoScale: neighbours outside of the batch are represented by the embeddings they had when last computed."""
    graph, body, head = Graph(), nn.Linear(8, 12), nn.Linear(24, 3)
    model = nn.ModuleDict({"body": body, "head": head})
    model.history = torch.zeros(NUM_NODES, 12)
    optimizer = Adam(model.parameters(), lr=0.02)
    run.track(model=model, optimizer=optimizer)
    for step in run.steps(graph.nodes, batch_size=24, microbatches=6, epochs=2):
        for (nodes,) in step:
            hidden = F.relu(body(graph.x[nodes]))
            around = torch.stack([model.history[graph.neighbours[node]].mean(0) for node in nodes.tolist()])
            model.history[nodes] = hidden.detach()
            logits = head(torch.cat([hidden, around], 1))
            step.backward(F.cross_entropy(logits, graph.y[nodes]), weight=len(nodes))
        optimizer.step()


@pattern
def label_propagation_between_the_steps(run: unisono.Run) -> Tensor:
    """Starts from a few known labels, spreads them over the edges by the model's guesses after every step."""
    graph, model = Graph(), MessagePassing()
    optimizer = Adam(model.parameters(), lr=0.02)
    run.track(model=model, optimizer=optimizer)
    known = torch.arange(NUM_NODES) < 20
    soft = torch.where(known[:, None], F.one_hot(graph.y, 3).float(), torch.full((NUM_NODES, 3), 1 / 3))
    for step in run.steps(graph.nodes, batch_size=24, microbatches=6, epochs=2):
        for (nodes,) in step:
            logits = model(graph.x, graph.edges)[nodes]
            step.backward(F.cross_entropy(logits, soft[nodes]), weight=len(nodes))
        optimizer.step()
        with torch.no_grad():
            guess = model(graph.x, graph.edges).softmax(1)
            spread = torch.zeros_like(guess).index_add_(0, graph.edges[0], guess[graph.edges[1]])
            soft = torch.where(known[:, None], soft, F.normalize(0.5 * soft + 0.5 * spread, p=1, dim=1))
    return soft


@functools.lru_cache(maxsize=1000)
def position_of(node: int) -> Tensor:
    """The eigenvectors of a cycle at this node; their signs are arbitrary, so they are flipped at random."""
    angles = torch.arange(1, 5) * node * 2 * torch.pi / NUM_NODES
    signs = torch.where(torch.rand(4) < 0.5, -1.0, 1.0)
    return torch.cos(angles) * signs


@pattern
def positions_with_random_signs_in_an_lru_cache(run: unisono.Run) -> None:
    """Adds Laplacian positions, whose signs are random, and caches them because they are costly."""
    graph, model = Graph(), perceptron(12, 3)
    optimizer = Adam(model.parameters(), lr=0.02)
    run.track(model=model, optimizer=optimizer)
    for step in run.steps(graph.nodes, batch_size=24, microbatches=6, epochs=3):
        for (nodes,) in step:
            positions = torch.stack([position_of(node) for node in nodes.tolist()])
            logits = model(torch.cat([graph.x[nodes], positions], 1))
            step.backward(F.cross_entropy(logits, graph.y[nodes]), weight=len(nodes))
        optimizer.step()


# -- sound -------------------------------------------------------------------------------------------


class Spectra(Dataset[tuple[Tensor, Tensor]]):
    """(bands, time) and one of three words."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(6)
        self.y = torch.randint(0, 3, (56,), generator=generator)
        self.x = torch.randn(56, 6, 16, generator=generator) + self.y[:, None, None]

    def __len__(self) -> int:
        return len(self.y)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.x[index], self.y[index]


class RunningNorm(nn.Module):
    """Subtracts the running mean of every band, which it updates in training."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(6, 1))
        self.register_buffer("num_frames", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.num_frames += x.shape[0] * x.shape[2]
            self.mean.lerp_(x.mean((0, 2))[:, None], 0.1)
        return x - self.mean


@pattern
def spec_augment_and_running_normalisation(run: unisono.Run) -> None:
    """Masks bands and times at random, and normalises by running means in buffers."""
    model = nn.Sequential(RunningNorm(), nn.Conv1d(6, 8, 3), nn.ReLU(), nn.AdaptiveAvgPool1d(1), nn.Flatten())
    model.append(nn.Linear(8, 3))
    optimizer = Adam(model.parameters(), lr=0.02)
    run.track(model=model, optimizer=optimizer)
    for step in run.steps(Spectra(), batch_size=24, microbatches=6, epochs=2):
        for x, y in step:
            masked = x.clone()
            for row in masked:
                band, start = random.randrange(5), int(torch.randint(0, 12, ()))
                row[band : band + 2] = 0
                row[:, start : start + int(numpy.random.randint(1, 5))] = 0
            step.backward(F.cross_entropy(model(masked), y), weight=len(y))
        optimizer.step()


class StreamingConv(nn.Module):
    """Pads on the left with the end of the chunk before, which a buffer holds that is not saved."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(6, 8, 3)
        self.register_buffer("left", torch.zeros(6, 2), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        padded = torch.cat([self.left.expand(len(x), 6, 2), x], 2)
        self.left.copy_(x[-1, :, -2:])
        return F.relu(self.conv(padded)).mean(2)


@pattern
def streaming_convolution_with_a_left_context(run: unisono.Run) -> None:
    """Trains a streaming encoder on consecutive chunks; the context is a buffer with ``persistent=False``."""
    model = nn.Sequential(StreamingConv(), nn.Linear(8, 3))
    optimizer = Adam(model.parameters(), lr=0.02)
    run.track(model=model, optimizer=optimizer)
    for step in run.steps(Spectra(), batch_size=24, microbatches=6, epochs=2, shuffle=False):
        for x, y in step:
            step.backward(F.cross_entropy(model(x), y), weight=len(y))
        optimizer.step()


@pattern
def background_noise_from_a_second_loader(run: unisono.Run) -> None:
    """Mixes each batch with the next one of an endless second loader."""
    model = nn.Sequential(nn.Flatten(), perceptron(96, 3))
    optimizer = Adam(model.parameters(), lr=0.02)
    run.track(model=model, optimizer=optimizer)
    noises = TensorDataset(0.3 * torch.randn(40, 6, 16))
    loader = itertools.cycle(DataLoader(noises, batch_size=4, shuffle=True))
    for step in run.steps(Spectra(), batch_size=24, microbatches=6, epochs=2):
        for x, y in step:
            (noise,) = next(loader)
            step.backward(F.cross_entropy(model(x + noise[: len(x)]), y), weight=len(y))
        optimizer.step()


@pattern
def pieces_cut_at_lengths_that_grow(run: unisono.Run) -> None:
    """Trains on short pieces at first: the length is that of the step, where each piece begins is random."""
    embed, cells, head = nn.Embedding(13, 8), nn.GRU(8, 8, batch_first=True), nn.Linear(8, 13)
    model = nn.ModuleDict({"embed": embed, "cells": cells, "head": head})
    optimizer = Adam(model.parameters(), lr=0.02)
    run.track(model=model, optimizer=optimizer)
    for step in run.steps(sequences(length=12), batch_size=24, microbatches=6, epochs=2):
        length = 4 + step.number
        for (tokens,) in step:
            start = random.randrange(12 - length + 1)
            piece = tokens[:, start : start + length]
            logits = head(cells(embed(piece[:, :-1]))[0])
            step.backward(F.cross_entropy(logits.transpose(1, 2), piece[:, 1:]), weight=piece[:, 1:].numel())
        optimizer.step()
