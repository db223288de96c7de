"""A graph network that learns from 50 labels what the other 1,747 nodes of a graph are.

    python examples/graph_network.py                        # alone
    unisono run examples/graph_network.py --workers 2       # on two workers: the same bits

The nodes are the handwritten digits that come with scikit-learn. The neighbours of a node are the ten digits that look
most like it. For every node of a batch, the dataset draws five of its neighbours, and five neighbours of each of those
(GraphSAGE, Hamilton et al. 2017). The library sets the generators before each sample, from the seed, the epoch and the
sample's number, so every worker would draw the same ones. With --no-edges, the network sees each node alone.
"""

from __future__ import annotations

import argparse

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

import unisono

DEGREE = 10  # edges to each node


def load() -> tuple[Tensor, Tensor, Tensor]:
    """Return the features of the nodes, (n, 64), their labels, (n,), and their neighbours, (n, DEGREE)."""
    digits = load_digits()
    features = torch.tensor(digits.data, dtype=torch.float32) / 16
    distances = torch.cdist(features, features).fill_diagonal_(torch.inf)
    return features, torch.tensor(digits.target), distances.topk(DEGREE, largest=False).indices


def draw(neighbours: Tensor, count: int) -> Tensor:
    """Draw some of each node's neighbours: (..., DEGREE) -> (..., count)."""
    return neighbours.gather(-1, torch.rand(neighbours.shape).argsort(-1)[..., :count])


class Neighbourhoods(Dataset[tuple[Tensor, Tensor, Tensor]]):
    """Nodes with neighbours: a node, (); some of its neighbours, (count,); some of theirs, (count, count)."""

    def __init__(self, nodes: Tensor, neighbours: Tensor, count: int) -> None:
        self._nodes = nodes
        self._neighbours = neighbours
        self._count = count

    def __len__(self) -> int:
        return len(self._nodes)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor, Tensor]:
        node = self._nodes[index]
        near = draw(self._neighbours[node], self._count)
        return node, near, draw(self._neighbours[near], self._count)


class Convolution(nn.Module):
    """Computes new features of a node from its own features and the mean of its neighbours'."""

    def __init__(self, num_in: int, num_out: int) -> None:
        super().__init__()
        self.own = nn.Linear(num_in, num_out)
        self.neighbours = nn.Linear(num_in, num_out, bias=False)

    def forward(self, own: Tensor, neighbours: Tensor) -> Tensor:
        """(..., num_in) and (..., count, num_in) -> (..., num_out)."""
        return self.own(own) + self.neighbours(neighbours.mean(-2))


class Network(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.first = Convolution(64, width)
        self.second = Convolution(width, 10)
        self.dropout = nn.Dropout(0.5)

    def forward(self, own: Tensor, near: Tensor, far: Tensor) -> Tensor:
        """(n, 64), (n, count, 64) and (n, count, count, 64) -> scores (n, 10)."""
        own, near, far = self.dropout(own), self.dropout(near), self.dropout(far)
        own, near = F.relu(self.first(own, near)), F.relu(self.first(near, far))
        return self.second(self.dropout(own), self.dropout(near))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=60)
    parser.add_argument("--batch-size", type=int, default=20, help="nodes")
    parser.add_argument("--microbatches", type=int, default=4, help="cuts of a batch: the most workers that make sense")
    parser.add_argument("--lr", type=float, default=1e-2)
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--labels", type=int, default=5, help="nodes of each digit to learn from")
    parser.add_argument("--count", type=int, default=5, help="neighbours of a node that are drawn")
    parser.add_argument("--no-edges", action="store_true", help="every node is its own only neighbour, for comparison")
    parser.add_argument("--run-dir", default="runs/graph_network")
    parser.add_argument("--overwrite", action="store_true", help="replace the run that is in this directory")
    parser.add_argument("--checkpoint-every", type=int, default=100, metavar="STEPS")
    arguments = parser.parse_args()
    features, labels, neighbours = load()
    if arguments.no_edges:
        neighbours = torch.arange(len(labels)).unsqueeze(1).expand(-1, DEGREE)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    of_digit = F.one_hot(labels[order]).cumsum(0).gather(1, labels[order].unsqueeze(1)).squeeze(1)  # 1st, 2nd ...
    known, unknown = order[of_digit <= arguments.labels], order[of_digit > arguments.labels]
    train_set = Neighbourhoods(known, neighbours, arguments.count)
    train_loader = DataLoader(train_set, batch_size=arguments.batch_size, shuffle=True)
    test_loader = DataLoader(Neighbourhoods(unknown, neighbours, DEGREE), batch_size=120)

    run = unisono.Run(
        arguments.run_dir,
        seed=arguments.seed,
        overwrite=arguments.overwrite,
        checkpoint=unisono.Checkpoints(every_steps=arguments.checkpoint_every),
    )
    features, labels = features.to(run.device), labels.to(run.device)
    model = Network(width=64).to(run.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=arguments.lr)
    run.track(model=model, optimizer=optimizer)

    for _ in run.epochs(arguments.epochs):
        for step in run.steps(train_loader, microbatches=arguments.microbatches):
            for nodes, near, far in step:
                loss = F.cross_entropy(model(features[nodes], features[near], features[far]), labels[nodes])
                loss.backward()
            optimizer.step()

    def count(batch: tuple[Tensor, Tensor, Tensor]) -> dict[str, Tensor | int]:
        nodes, near, far = batch
        scores = model(features[nodes], features[near], features[far])
        return {"right": (scores.argmax(1) == labels[nodes]).sum(), "seen": len(nodes)}

    totals = run.evaluate(test_loader, count)
    if run.is_main:
        accuracy = totals["right"] / totals["seen"]
        print(f"test accuracy {accuracy:.2%} ({totals['seen']:.0f} nodes, from the labels of {len(known)})")


if __name__ == "__main__":
    main()
