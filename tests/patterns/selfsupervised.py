"""Representations without labels, and teachers of all kinds."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD, Adam

import unisono
from tests.patterns.corpus import Indexed, labelled, pattern, perceptron


def augmented(x: Tensor) -> Tensor:
    return x + 0.2 * torch.randn_like(x)


class MoCo(nn.Module):
    """As published: forward moves the key encoder, and puts the keys into the queue."""

    def __init__(self, dim: int = 6, length: int = 32) -> None:
        super().__init__()
        self.queries, self.keys = perceptron(8, dim), perceptron(8, dim)
        self.keys.load_state_dict(self.queries.state_dict())
        self.keys.requires_grad_(False)
        self.register_buffer("queue", F.normalize(torch.randn(length, dim), dim=1))
        self.register_buffer("queue_ptr", torch.zeros(1, dtype=torch.long))

    @torch.no_grad()
    def _momentum_update(self) -> None:
        for slow, fast in zip(self.keys.parameters(), self.queries.parameters(), strict=True):
            slow.data = slow.data * 0.9 + fast.data * 0.1

    @torch.no_grad()
    def _enqueue(self, keys: Tensor) -> None:
        pointer = int(self.queue_ptr)
        for key in keys:
            self.queue[pointer % len(self.queue)] = key
            pointer += 1
        self.queue_ptr[0] = pointer % len(self.queue)

    def forward(self, x: Tensor) -> Tensor:
        q = F.normalize(self.queries(augmented(x)), dim=1)
        with torch.no_grad():
            self._momentum_update()
            k = F.normalize(self.keys(augmented(x)), dim=1)
        logits = torch.cat([(q * k).sum(1, keepdim=True), q @ self.queue.clone().T], 1) / 0.2
        self._enqueue(k)
        return F.cross_entropy(logits, torch.zeros(len(x), dtype=torch.long))


@pattern
def moco_as_published(run: unisono.Run) -> None:
    """Trains MoCo, which updates its momentum encoder and its queue of keys in forward."""
    model = MoCo()
    optimizer = SGD(model.queries.parameters(), lr=0.1)
    run.track(model=model, optimizer=optimizer)
    for step in run.steps(labelled(), batch_size=24, microbatches=6, epochs=2):
        for x, _ in step:
            step.backward(model(x), weight=len(x))
        optimizer.step()


@pattern
def queue_of_negatives_in_a_list(run: unisono.Run) -> None:
    """Contrasts each batch with the keys of the last eight batches; the encoder of the keys moves after each step."""
    online = perceptron(8, 6)
    momentum = copy.deepcopy(online).requires_grad_(False)
    optimizer = SGD(online.parameters(), lr=0.1)
    run.track(online=online, momentum=momentum, optimizer=optimizer)
    queue: list[Tensor] = []
    for step in run.steps(labelled(), batch_size=24, microbatches=6, epochs=2):
        for x, _ in step:
            q, k = F.normalize(online(augmented(x)), dim=1), F.normalize(momentum(augmented(x)), dim=1)
            logits = q @ torch.cat([k, *queue]).T / 0.2
            step.backward(F.cross_entropy(logits, torch.arange(len(x))), weight=len(x))
            queue = [*queue, k][-8:]
        optimizer.step()
        with torch.no_grad():
            for slow, fast in zip(momentum.parameters(), online.parameters(), strict=True):
                slow.mul_(0.9).add_(fast, alpha=0.1)


@pattern
def target_encoder_that_follows_after_each_step(run: unisono.Run) -> None:
    """BYOL: predicts what a slow copy of the encoder says of another view; the copy's momentum grows to 1."""
    online, predictor = perceptron(8, 6), nn.Linear(6, 6)
    target = copy.deepcopy(online).requires_grad_(False)
    optimizer = SGD([*online.parameters(), *predictor.parameters()], lr=0.1, momentum=0.9)
    run.track(online=online, predictor=predictor, target=target, optimizer=optimizer)
    for step in run.steps(labelled(), batch_size=24, microbatches=6, epochs=2):
        for x, _ in step:
            one, other = augmented(x), augmented(x)
            loss = -F.cosine_similarity(predictor(online(one)), target(other)).mean()
            loss = loss - F.cosine_similarity(predictor(online(other)), target(one)).mean()
            step.backward(loss, weight=len(x))
        optimizer.step()
        momentum = 1 - 0.1 * (1 - step.number / 6)
        with torch.no_grad():
            torch._foreach_mul_(list(target.parameters()), momentum)
            torch._foreach_add_(list(target.parameters()), list(online.parameters()), alpha=1 - momentum)


class DinoLoss(nn.Module):
    """Cross-entropy to the teacher's centred and sharpened outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("center", torch.zeros(1, 6))

    def forward(self, student: Tensor, teacher: Tensor) -> Tensor:
        targets = ((teacher - self.center) / 0.07).softmax(1)
        loss = -(targets * (student / 0.1).log_softmax(1)).sum(1).mean()
        self.center = 0.9 * self.center + 0.1 * teacher.mean(0, keepdim=True)
        return loss


def train_dino(run: unisono.Run, *, tracks_loss: bool) -> None:
    student, loss_of = perceptron(8, 6), DinoLoss()
    teacher = copy.deepcopy(student).requires_grad_(False)
    optimizer = Adam(student.parameters(), lr=0.01)
    run.track(student=student, teacher=teacher, optimizer=optimizer)
    if tracks_loss:
        run.track(loss=loss_of)
    for step in run.steps(labelled(), batch_size=24, microbatches=6, epochs=2):
        for x, _ in step:
            with torch.no_grad():
                wanted = teacher(augmented(x))
            step.backward(loss_of(student(augmented(x)), wanted), weight=len(x))
        optimizer.step()
        with torch.no_grad():
            for slow, fast in zip(teacher.parameters(), student.parameters(), strict=True):
                slow.lerp_(fast, 0.1)


@pattern
def centre_of_the_teacher_in_a_tracked_loss(run: unisono.Run) -> None:
    """DINO: the loss is a module with the centre in a buffer, and is tracked."""
    train_dino(run, tracks_loss=True)


@pattern
def centre_of_the_teacher_in_a_loss_that_is_not_tracked(run: unisono.Run) -> None:
    """DINO: the loss is a module with the centre in a buffer; it has no parameters, so it is not tracked."""
    train_dino(run, tracks_loss=False)


class Codebook(nn.Module):
    """VQ-VAE: codes are moving averages of what was assigned to them; unused ones are put onto a sample."""

    def __init__(self, number: int = 6, dim: int = 4) -> None:
        super().__init__()
        self.register_buffer("embed", torch.randn(number, dim))
        self.register_buffer("cluster_size", torch.ones(number))
        self.register_buffer("embed_sum", self.embed.clone())

    def forward(self, z: Tensor) -> tuple[Tensor, Tensor]:
        chosen = torch.cdist(z.detach(), self.embed).argmin(1)
        codes = self.embed[chosen]
        if self.training:
            with torch.no_grad():
                hot = F.one_hot(chosen, len(self.embed)).float()
                self.cluster_size.mul_(0.8).add_(hot.sum(0), alpha=0.2)
                self.embed_sum.mul_(0.8).add_(hot.T @ z, alpha=0.2)
                self.embed.copy_(self.embed_sum / self.cluster_size.clamp(min=1e-3)[:, None])
                is_dead = self.cluster_size < 0.3
                restarted = z[torch.randint(0, len(z), (len(self.embed),))]
                self.embed.copy_(torch.where(is_dead[:, None], restarted, self.embed))
        return z + (codes - z).detach(), F.mse_loss(z, codes)


@pattern
def codebook_with_moving_averages(run: unisono.Run) -> None:
    """Trains a VQ-VAE; the codes, their sizes and their sums are buffers that forward moves."""
    encode, codebook, decode = perceptron(8, 4), Codebook(), perceptron(4, 8)
    model = nn.ModuleDict({"encode": encode, "codebook": codebook, "decode": decode})
    optimizer = Adam(model.parameters(), lr=0.01)
    run.track(model=model, optimizer=optimizer)
    for step in run.steps(labelled(), batch_size=24, microbatches=6, epochs=2):
        for x, _ in step:
            codes, commitment = codebook(encode(x))
            step.backward(F.mse_loss(decode(codes), x) + 0.25 * commitment, weight=len(x))
        optimizer.step()


@pattern
def prototypes_normalised_before_each_batch(run: unisono.Run) -> None:
    """SwAV: the rows of the prototypes are brought to length 1 at the beginning of each batch."""
    encoder, prototypes = perceptron(8, 6), nn.Linear(6, 5, bias=False)
    optimizer = Adam([*encoder.parameters(), *prototypes.parameters()], lr=0.01)
    run.track(encoder=encoder, prototypes=prototypes, optimizer=optimizer)
    for step in run.steps(labelled(), batch_size=24, microbatches=6, epochs=2):
        for x, _ in step:
            with torch.no_grad():
                prototypes.weight.copy_(F.normalize(prototypes.weight, dim=1))
            one, other = (prototypes(F.normalize(encoder(augmented(x)), dim=1)) for _ in range(2))
            with torch.no_grad():
                q = (other / 0.05).softmax(1)
                for _ in range(3):
                    q = F.normalize(F.normalize(q, p=1, dim=0), p=1, dim=1)
            step.backward(-(q * (one / 0.1).log_softmax(1)).sum(1).mean(), weight=len(x))
        optimizer.step()


class WithMeanTeacher(nn.Module):
    """The teacher is in a list, so that its parameters are not those of the model."""

    def __init__(self) -> None:
        super().__init__()
        self.student = perceptron(8, 3, dropout=0.2)
        self._teacher = [copy.deepcopy(self.student).requires_grad_(False)]

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        teacher = self._teacher[0]
        if self.training:
            with torch.no_grad():
                for slow, fast in zip(teacher.parameters(), self.student.parameters(), strict=True):
                    slow.lerp_(fast, 0.1)
        return self.student(augmented(x)), teacher(augmented(x))


@pattern
def mean_teacher_hidden_in_the_model(run: unisono.Run) -> None:
    """Learns from a mean teacher that the model moves in forward; it is neither parameter nor buffer of the model."""
    model = WithMeanTeacher()
    optimizer = Adam(model.parameters(), lr=0.01)
    run.track(model=model, optimizer=optimizer)
    for step in run.steps(labelled(), batch_size=24, microbatches=6, epochs=2):
        for x, y in step:
            student, teacher = model(x)
            loss = F.cross_entropy(student, y) + F.mse_loss(student.softmax(1), teacher.softmax(1))
            step.backward(loss, weight=len(y))
        optimizer.step()


@pattern
def memory_bank_of_features(run: unisono.Run) -> None:
    """Instance discrimination: each sample is told from a bank that has the last feature of every sample."""
    encoder = perceptron(8, 6)
    optimizer = Adam(encoder.parameters(), lr=0.01)
    run.track(encoder=encoder, optimizer=optimizer)
    bank = F.normalize(torch.randn(56, 6), dim=1)
    for step in run.steps(Indexed(labelled()), batch_size=24, microbatches=6, epochs=2):
        for x, _, index in step:
            features = F.normalize(encoder(augmented(x)), dim=1)
            step.backward(F.cross_entropy(features @ bank.T / 0.2, index), weight=len(x))
            with torch.no_grad():
                bank[index] = F.normalize(0.5 * bank[index] + 0.5 * features, dim=1)
        optimizer.step()


@pattern
def statistics_of_activations_for_the_screen(run: unisono.Run) -> None:
    """Collects mean and spread of activations by forward hooks, and prints them after every epoch."""
    model = perceptron(8, 3)
    optimizer = Adam(model.parameters(), lr=0.01)
    run.track(model=model, optimizer=optimizer)
    found: dict[str, list[float]] = {}

    def note(name: str) -> None:
        def hook(module: nn.Module, inputs: object, output: Tensor) -> None:
            found.setdefault(name, []).append(output.detach().std().item() if output.numel() > 1 else 0.0)

        model.get_submodule(name).register_forward_hook(hook)

    for name in ("0", "1", "3"):
        note(name)
    for step in run.steps(labelled(), batch_size=24, microbatches=6, epochs=2):
        for x, y in step:
            step.backward(F.cross_entropy(model(x), y), weight=len(y))
        optimizer.step()
        if step.is_last_of_epoch:
            print({name: round(sum(values) / len(values), 3) for name, values in found.items()})
            found.clear()
