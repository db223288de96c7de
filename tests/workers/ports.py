"""Whole programs of the structure of PyTorch's examples, and what is changed in them for many workers."""

from __future__ import annotations

from dataclasses import dataclass
from difflib import SequenceMatcher

__all__ = ["LIKE_FOR_LIKE", "PORTS", "Port"]

DATA = """
generator = torch.Generator().manual_seed(1)
x, y = torch.randn(54, 12, generator=generator), torch.randint(0, 4, (54,), generator=generator)
train_set, test_set = TensorDataset(x[:40], y[:40]), TensorDataset(x[40:], y[40:])
train_loader = DataLoader(train_set, batch_size=16, shuffle=True)
test_loader = DataLoader(test_set, batch_size=5)
"""

CLASSIFIER = f"""
import torch
from torch import nn, optim
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(1)
{DATA}
model = nn.Sequential(nn.Linear(12, 33), nn.ReLU(), nn.Dropout(0.25), nn.Linear(33, 4))
optimizer = optim.Adadelta(model.parameters(), lr=1.0)
scheduler = optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.7)


def train(epoch):
    model.train()
    for batch_idx, (data, target) in enumerate(train_loader):
        optimizer.zero_grad()
        output = F.log_softmax(model(data), dim=1)
        loss = F.nll_loss(output, target)
        loss.backward()
        optimizer.step()
        if batch_idx % 2 == 0:
            print(f"Train Epoch: {{epoch}} [{{batch_idx}}/{{len(train_loader)}}] Loss: {{loss.item():.6f}}")


def test():
    model.eval()
    test_loss = 0
    correct = 0
    with torch.no_grad():
        for data, target in test_loader:
            output = F.log_softmax(model(data), dim=1)
            test_loss += F.nll_loss(output, target, reduction="sum").item()  # sum up batch loss
            pred = output.argmax(dim=1, keepdim=True)  # get the index of the max log-probability
            correct += pred.eq(target.view_as(pred)).sum().item()

    test_loss /= len(test_loader.dataset)
    print(f"Test set: Average loss: {{test_loss:.9f}}, Accuracy: {{100.0 * correct / len(test_loader.dataset):.0f}}%")


for epoch in range(3):
    train(epoch)
    test()
    scheduler.step()
"""

AUTOENCODER = f"""
import torch
from torch import nn, optim
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(1)
{DATA}
encode, decode = nn.Linear(12, 8), nn.Linear(4, 12)
model = nn.ModuleList([encode, decode])
optimizer = optim.Adam(model.parameters(), lr=1e-3)


def loss_function(x):
    mu, logvar = encode(x).chunk(2, dim=1)
    found = decode(mu + torch.randn_like(mu) * torch.exp(0.5 * logvar))
    return F.mse_loss(found, x, reduction="sum") - 0.5 * torch.sum(1 + logvar - mu.pow(2) - logvar.exp())


def train(epoch):
    model.train()
    train_loss = 0
    for batch_idx, (data, _) in enumerate(train_loader):
        optimizer.zero_grad()
        loss = loss_function(data)
        loss.backward()
        train_loss += loss.item()
        optimizer.step()
        if batch_idx % 2 == 0:
            print(f"Train Epoch: {{epoch}} [{{batch_idx}}/{{len(train_loader)}}] Loss: {{loss.item() / len(data):.6f}}")

    print(f"====> Epoch: {{epoch}} Average loss: {{train_loss / len(train_loader.dataset):.4f}}")


def test(epoch):
    model.eval()
    test_loss = 0
    with torch.no_grad():
        for data, _ in test_loader:
            test_loss += loss_function(data).item()

    test_loss /= len(test_loader.dataset)
    print(f"====> Test set loss: {{test_loss:.9f}}")


for epoch in range(3):
    train(epoch)
    test(epoch)
"""

RESOLUTION = f"""
from math import log10

import torch
from torch import nn, optim
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(1)
{DATA}
model = nn.Sequential(nn.Linear(12, 12), nn.Tanh(), nn.Linear(12, 12))
criterion = nn.MSELoss()
optimizer = optim.Adam(model.parameters(), lr=0.01)


def train(epoch):
    epoch_loss = 0
    for iteration, batch in enumerate(train_loader, 1):
        optimizer.zero_grad()
        loss = criterion(model(batch[0]), batch[0])
        epoch_loss += loss.item()
        loss.backward()
        optimizer.step()

        print(f"===> Epoch[{{epoch}}]({{iteration}}/{{len(train_loader)}}): Loss: {{loss.item():.4f}}")

    print(f"===> Epoch {{epoch}} Complete: Avg. Loss: {{epoch_loss / len(train_loader):.4f}}")


def test():
    avg_psnr = 0
    with torch.no_grad():
        for batch in test_loader:
            mse = criterion(model(batch[0]), batch[0])
            psnr = 10 * log10(1 / mse.item())
            avg_psnr += psnr
    print(f"===> Avg. PSNR: {{avg_psnr / len(test_loader):.9f}} dB")


for epoch in range(3):
    train(epoch)
    test()
"""

REGRESSION = """
from itertools import count

import torch
from torch.nn import functional as F

generator = torch.Generator().manual_seed(1)
W_target = torch.randn(4, 1, generator=generator) * 5
b_target = torch.randn(1, generator=generator) * 5


def get_batch(batch_size=32):
    x = torch.randn(batch_size).unsqueeze(1)
    x = torch.cat([x**i for i in range(1, 5)], 1)
    return x, x.mm(W_target) + b_target.item()


fc = torch.nn.Linear(W_target.size(0), 1)

for batch_idx in count(1):
    # Get data
    batch_x, batch_y = get_batch()

    # Reset gradients
    fc.zero_grad()

    # Forward pass
    output = F.smooth_l1_loss(fc(batch_x), batch_y)
    loss = output.item()

    # Backward pass
    output.backward()

    # Apply gradients
    for param in fc.parameters():
        param.data.add_(-0.1 * param.grad)

    # Stop criterion
    if loss < 6:
        break

print("Loss: {:.6f} after {} batches".format(loss, batch_idx))
"""

IMPORTS = ("import torch\n", "import torch\nimport unisono\n")
SEED = ("torch.manual_seed(1)\n", "run = unisono.Run(seed=1)\n")
TESTED = ("in test_loader:", "in run.batches(test_loader):")


@dataclass(frozen=True)
class Port:
    """A program for one device, and the same for many workers."""

    plain: str
    changes: tuple[tuple[str, str], ...]
    indented: tuple[str, str]
    """The first and the last line of what becomes the body of the inner loop."""
    lines: int
    """That are added; those that only move to the right are not counted."""

    @property
    def ported(self) -> str:
        """The program for many workers."""
        first, last = (self.plain.index(f"\n{line}") for line in self.indented)
        end = self.plain.index("\n", last + 1)
        body = self.plain[first:end].replace("\n    ", "\n        ")
        text = self.plain[:first] + body + self.plain[end:]
        for old, new in self.changes:
            assert text.count(old) >= 1, old
            text = text.replace(old, new, 1)
        return text

    def count(self) -> int:
        """Return how many lines are added, as ``git diff --numstat -w`` counts."""
        plain, ported = ([line.strip() for line in text.splitlines()] for text in (self.plain, self.ported))
        changes = SequenceMatcher(None, plain, ported, autojunk=False).get_opcodes()
        return sum(end - begin for kind, _, _, begin, end in changes if kind in ("insert", "replace"))


PORTS = {
    "mnist": Port(
        CLASSIFIER,
        (
            IMPORTS,
            SEED,
            ("gamma=0.7)\n", "gamma=0.7)\nrun.track(model=model, optimizer=optimizer, scheduler=scheduler)\n"),
            (
                "    for batch_idx, (data, target) in enumerate(train_loader):\n",
                "    for step in run.steps(train_loader, microbatches=8):\n        for data, target in step:\n",
            ),
            ("        if batch_idx % 2", "        if step.index % 2"),
            (
                "[{batch_idx}/{len(train_loader)}] Loss: {loss.item()",
                "[{step.index}/{len(train_loader)}] Loss: {step.loss",
            ),
            (
                "    test_loss = 0\n    correct = 0\n",
                '    test_loss, correct = run.total("test_loss"), run.total("correct")\n',
            ),
            TESTED,
        ),
        ("        optimizer.zero_grad()", "        loss.backward()"),
        9,
    ),
    "vae": Port(
        AUTOENCODER,
        (
            IMPORTS,
            SEED,
            ("lr=1e-3)\n", "lr=1e-3)\nrun.track(model=model, optimizer=optimizer)\n"),
            ("    train_loss = 0\n", '    train_loss = run.total("train_loss")\n'),
            (
                "    for batch_idx, (data, _) in enumerate(train_loader):\n",
                '    for step in run.steps(train_loader, microbatches=8, reduction="sum"):\n'
                "        for data, _ in step:\n",
            ),
            ("        if batch_idx % 2", "        if step.index % 2"),
            (
                "[{batch_idx}/{len(train_loader)}] Loss: {loss.item() / len(data)",
                "[{step.index}/{len(train_loader)}] Loss: {step.loss / step.num_samples",
            ),
            ("    test_loss = 0\n", '    test_loss = run.total("test_loss")\n'),
            TESTED,
        ),
        ("        optimizer.zero_grad()", "        train_loss += loss.item()"),
        10,
    ),
    "super resolution": Port(
        RESOLUTION,
        (
            IMPORTS,
            SEED,
            ("lr=0.01)\n", "lr=0.01)\nrun.track(model=model, optimizer=optimizer)\n"),
            (
                "    for iteration, batch in enumerate(train_loader, 1):\n",
                "    for step in run.steps(train_loader, microbatches=8):\n        for batch in step:\n",
            ),
            ("            epoch_loss += loss.item()\n", ""),
            (
                "({iteration}/{len(train_loader)}): Loss: {loss.item()",
                "({step.index + 1}/{len(train_loader)}): Loss: {step.loss",
            ),
            ("    epoch_loss = 0\n", ""),
            ("{epoch_loss / len(train_loader)", "{run.loss"),
            ("    avg_psnr = 0\n", '    avg_psnr = run.total("avg_psnr")\n'),
            TESTED,
        ),
        ("        optimizer.zero_grad()", "        loss.backward()"),
        9,
    ),
    "regression": Port(
        REGRESSION,
        (
            IMPORTS,
            ("fc = torch", "run = unisono.Run(seed=1)\nfc = torch"),
            (
                "\nfor batch_idx in count(1):\n        # Get data\n",
                "run.track(fc=fc)\n\n"
                "for step in run.steps(range(8 * 10**6), batch_size=8, microbatches=8):\n"
                "    for _ in step:\n        # Get data\n",
            ),
            ("\n        loss = output.item()\n", "\n"),
            (
                "        output.backward()\n",
                "        output.backward()\n    loss, batch_idx = step.loss, step.number + 1\n",
            ),
        ),
        ("    # Get data", "    output.backward()"),
        6,
    ),
}
"""With the figures of the program for one device: of the whole batch, over the whole test set."""

BATCHES = "    for batch_idx, {} in enumerate(train_loader):\n"
STEPS = "    for batch_idx, step in enumerate(run.steps(train_loader, microbatches=8{})):\n        for {} in step:\n"

LIKE_FOR_LIKE = {
    "mnist": Port(
        CLASSIFIER,
        (*PORTS["mnist"].changes[:3], (BATCHES.format("(data, target)"), STEPS.format("", "data, target"))),
        PORTS["mnist"].indented,
        5,
    ),
    "vae": Port(
        AUTOENCODER,
        (*PORTS["vae"].changes[:3], (BATCHES.format("(data, _)"), STEPS.format(', reduction="sum"', "data, _"))),
        PORTS["vae"].indented,
        5,
    ),
    "super resolution": Port(
        RESOLUTION,
        (
            *PORTS["super resolution"].changes[:3],
            (
                "    for iteration, batch in enumerate(train_loader, 1):\n",
                "    for iteration, step in enumerate(run.steps(train_loader, microbatches=8), 1):\n"
                "        for batch in step:\n",
            ),
        ),
        PORTS["super resolution"].indented,
        5,
    ),
}
"""As a port to Accelerate leaves them: what is printed within the training loop is one micro-batch's loss, and sums are
of this worker's micro-batches. Each worker goes through the whole test set."""
