"""Tricks of the trade that belong to no field: what is done around the optimizer, and with the weights."""

from __future__ import annotations

import copy
import json
import os
import time
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F
from torch.nn.utils import parametrizations, prune
from torch.optim import SGD, AdamW
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.optim.swa_utils import SWALR, AveragedModel, update_bn
from torch.utils.data import DataLoader

import unisono
from tests.patterns.corpus import labelled, num_correct, pattern, perceptron


@pattern
def sharpness_aware_minimisation(run: unisono.Run) -> None:
    """SAM as it is usually written: climbs, computes the gradient there, and comes back, for every batch."""
    model = perceptron()
    optimizer = SGD(model.parameters(), lr=0.1)
    run.track(model=model, optimizer=optimizer)
    parameters = list(model.parameters())
    for step in run.steps(labelled(), batch_size=24, microbatches=6, epochs=2):
        for x, y in step:
            gradients = torch.autograd.grad(F.cross_entropy(model(x), y), parameters)
            length = torch.stack([gradient.norm() for gradient in gradients]).norm()
            climbs = [0.05 * gradient / length for gradient in gradients]
            with torch.no_grad():
                for parameter, climb in zip(parameters, climbs, strict=True):
                    parameter.add_(climb)
            step.backward(F.cross_entropy(model(x), y), weight=len(y))
            with torch.no_grad():
                for parameter, climb in zip(parameters, climbs, strict=True):
                    parameter.sub_(climb)
        optimizer.step()


@pattern
def sharpness_aware_by_the_gradient_before(run: unisono.Run) -> None:
    """A cheap SAM: climbs along the last step's gradient at the head of the step, and comes back before the update."""
    model = perceptron()
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
    run.track(model=model, optimizer=optimizer)
    climbs: list[Tensor] = []
    for step in run.steps(labelled(), batch_size=24, microbatches=6, epochs=2):
        with torch.no_grad():
            for parameter, climb in zip(model.parameters(), climbs, strict=False):
                parameter.add_(climb)
        for x, y in step:
            step.backward(F.cross_entropy(model(x), y), weight=len(y))
        with torch.no_grad():
            for parameter, climb in zip(model.parameters(), climbs, strict=False):
                parameter.sub_(climb)
            length = nn.utils.get_total_norm([parameter.grad for parameter in model.parameters()])
            climbs = [0.05 * parameter.grad / length for parameter in model.parameters()]
        optimizer.step()


@pattern
def average_of_the_last_epoch_with_its_own_statistics(run: unisono.Run) -> Any:
    """SWA: averages the weights from the second epoch on, and recomputes the BatchNorm statistics at the end."""
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3))
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
    average, scheduler = AveragedModel(model), SWALR(optimizer, swa_lr=0.05, anneal_epochs=2)
    run.track(model=model, average=average, optimizer=optimizer, scheduler=scheduler)
    data = labelled(96)
    for step in run.steps(data, batch_size=24, microbatches=6, epochs=2):
        for x, y in step:
            step.backward(F.cross_entropy(model(x), y), weight=len(y))
        optimizer.step()
        if step.epoch == 1:
            average.update_parameters(model)
            scheduler.step()
    update_bn(DataLoader(data, batch_size=12, shuffle=True), average)
    return run.evaluate(data, partial(num_correct, average), batch_size=10)


@pattern
def lookahead_every_third_step(run: unisono.Run) -> None:
    """Goes halfway back to the slow weights every third step; the slow weights are a list of tensors."""
    model = perceptron()
    optimizer = AdamW(model.parameters(), lr=0.02)
    run.track(model=model, optimizer=optimizer)
    slow = [parameter.detach().clone() for parameter in model.parameters()]
    for step in run.steps(labelled(), batch_size=24, microbatches=6, epochs=2):
        for x, y in step:
            step.backward(F.cross_entropy(model(x), y), weight=len(y))
        optimizer.step()
        if step.number % 3 == 2:
            for kept, parameter in zip(slow, model.parameters(), strict=True):
                kept.add_(parameter.data - kept, alpha=0.5)
                parameter.data.copy_(kept)


@pattern
def pruning_in_the_middle(run: unisono.Run) -> None:
    """Prunes half of a layer's weights by size after the first epoch, and makes it permanent at the end."""
    model = perceptron()
    optimizer = AdamW(model.parameters(), lr=0.02)
    run.track(model=model, optimizer=optimizer)
    for step in run.steps(labelled(), batch_size=24, microbatches=6, epochs=2):
        if step.epoch == 1 and not prune.is_pruned(model):
            prune.l1_unstructured(model[0], "weight", amount=0.5)
        for x, y in step:
            step.backward(F.cross_entropy(model(x), y), weight=len(y))
        optimizer.step()
    prune.remove(model[0], "weight")


class Quantised(nn.Module):
    """Rounds activations to 16 levels between the smallest and the largest seen (straight through)."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("low", torch.tensor(float("inf")))
        self.register_buffer("high", torch.tensor(float("-inf")))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.low.copy_(torch.minimum(self.low, x.detach().min()))
            self.high.copy_(torch.maximum(self.high, x.detach().max()))
        scale = (self.high - self.low).clamp(min=1e-3) / 15
        rounded = ((x - self.low) / scale).round().clamp(0, 15) * scale + self.low
        return x + (rounded - x).detach()


@pattern
def quantisation_aware_training(run: unisono.Run) -> None:
    """Trains with fake quantisation, whose observers keep the smallest and the largest activation in buffers."""
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), Quantised(), nn.Linear(16, 3))
    optimizer = AdamW(model.parameters(), lr=0.02)
    run.track(model=model, optimizer=optimizer)
    for step in run.steps(labelled(), batch_size=24, microbatches=6, epochs=2):
        for x, y in step:
            step.backward(F.cross_entropy(model(x), y), weight=len(y))
        optimizer.step()


@pattern
def dynamic_weight_average_of_two_tasks(run: unisono.Run) -> None:
    """Weights two tasks by how fast the losses fell that were summed over the batches of the last two epochs."""
    body, classes, inputs = nn.Linear(8, 16), nn.Linear(16, 3), nn.Linear(16, 8)
    model = nn.ModuleDict({"body": body, "classes": classes, "inputs": inputs})
    optimizer = AdamW(model.parameters(), lr=0.02)
    run.track(model=model, optimizer=optimizer)
    sums, weights = torch.zeros(4, 2), torch.ones(2)
    for step in run.steps(labelled(), batch_size=24, microbatches=6, epochs=4):
        if step.number % 3 == 0 and step.epoch >= 2:
            ratio = sums[step.epoch - 1] / sums[step.epoch - 2]
            weights = 2 * (ratio / 0.5).softmax(0)
        for x, y in step:
            hidden = torch.tanh(body(x))
            losses = torch.stack([F.cross_entropy(classes(hidden), y), F.mse_loss(inputs(hidden), x)])
            sums[step.epoch] += losses.detach()
            step.backward((weights * losses).sum(), weight=len(y))
        optimizer.step()


@pattern
def uncertainty_weights_and_parametrizations(run: unisono.Run) -> None:
    """Weights two tasks by learned variances; one layer has weight_norm, another is orthogonal."""
    body = parametrizations.weight_norm(nn.Linear(8, 16))
    classes, inputs = nn.Linear(16, 3), parametrizations.orthogonal(nn.Linear(16, 8))
    model = nn.ModuleDict({"body": body, "classes": classes, "inputs": inputs})
    log_variances = nn.ParameterList([nn.Parameter(torch.zeros(())) for _ in range(2)])
    optimizer = AdamW([*model.parameters(), *log_variances], lr=0.02)
    run.track(model=model, log_variances=log_variances, optimizer=optimizer)
    for step in run.steps(labelled(), batch_size=24, microbatches=6, epochs=2):
        for x, y in step:
            hidden = torch.tanh(body(x))
            losses = [F.cross_entropy(classes(hidden), y), F.mse_loss(inputs(hidden), x)]
            loss = sum((-s).exp() * one + s for s, one in zip(log_variances, losses, strict=True))
            step.backward(loss, weight=len(y))
        nn.utils.clip_grad_norm_([*model.parameters(), *log_variances], 1.0)
        optimizer.step()


@pattern
def plateau_of_the_last_batch_loss(run: unisono.Run) -> None:
    """Gives the scheduler the loss that the batch loop computed last."""
    model = perceptron()
    optimizer = SGD(model.parameters(), lr=0.5)
    scheduler = ReduceLROnPlateau(optimizer, patience=0, factor=0.5)
    run.track(model=model, optimizer=optimizer, scheduler=scheduler)
    for step in run.steps(labelled(), batch_size=24, microbatches=6, epochs=3):
        for x, y in step:
            loss = F.cross_entropy(model(x), y)
            step.backward(loss, weight=len(y))
        optimizer.step()
        scheduler.step(loss.item())


@pattern
def plateau_of_the_step_loss_and_early_stopping(run: unisono.Run) -> Any:
    """Halves the learning rate by the loss of the step, stops when it no longer falls, and takes the best weights."""
    model = perceptron()
    optimizer = SGD(model.parameters(), lr=2.0)
    scheduler = ReduceLROnPlateau(optimizer, patience=0, factor=0.5)
    run.track(model=model, optimizer=optimizer, scheduler=scheduler)
    best, kept, patience = float("inf"), copy.deepcopy(model.state_dict()), 0
    for step in run.steps(labelled(), batch_size=24, microbatches=6, epochs=4):
        for x, y in step:
            step.backward(F.cross_entropy(model(x), y), weight=len(y))
        if step.loss < best:
            best, kept, patience = step.loss, copy.deepcopy(model.state_dict()), 0
        else:
            patience += 1
        optimizer.step()
        scheduler.step(step.loss)
        if patience == 3:
            break
    model.load_state_dict(kept)
    return run.evaluate(labelled(), partial(num_correct, model), batch_size=10)


@pattern
def clipping_after_each_backward(run: unisono.Run) -> None:
    """Clips the gradients right after every backward, within the batch loop."""
    model = perceptron()
    optimizer = SGD(model.parameters(), lr=0.1)
    run.track(model=model, optimizer=optimizer)
    for step in run.steps(labelled(), batch_size=24, microbatches=6, epochs=2):
        for x, y in step:
            step.backward(F.cross_entropy(model(x), y), weight=len(y))
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()


@pattern
def gradients_set_to_none_before_each_backward(run: unisono.Run) -> None:
    """Calls ``optimizer.zero_grad()`` at the head of each batch, out of habit."""
    model = perceptron()
    optimizer = AdamW(model.parameters(), lr=0.02)
    run.track(model=model, optimizer=optimizer)
    for step in run.steps(labelled(), batch_size=24, microbatches=6, epochs=2):
        for x, y in step:
            optimizer.zero_grad()
            step.backward(F.cross_entropy(model(x), y), weight=len(y))
        optimizer.step()


@pattern
def gradient_noise_and_centralisation(run: unisono.Run) -> None:
    """Centralises gradients by hooks on the parameters, and adds noise to them before the update."""
    model = perceptron()
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
    run.track(model=model, optimizer=optimizer)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.register_hook(lambda gradient: gradient - gradient.mean(1, keepdim=True))
    for step in run.steps(labelled(), batch_size=24, microbatches=6, epochs=2):
        for x, y in step:
            step.backward(F.cross_entropy(model(x), y), weight=len(y))
        for parameter in model.parameters():
            parameter.grad += torch.randn_like(parameter.grad) * (0.01 / (1 + step.number) ** 0.55)
        optimizer.step()


@pattern
def maml_with_functional_call(run: unisono.Run) -> None:
    """Adapts to half of the batch by two differentiable gradient steps, and trains on the other half."""
    model = perceptron()
    optimizer = AdamW(model.parameters(), lr=0.02)
    run.track(model=model, optimizer=optimizer)
    for step in run.steps(labelled(48), batch_size=24, microbatches=6, epochs=3):
        for x, y in step:
            weights = dict(model.named_parameters())
            for _ in range(2):
                loss = F.cross_entropy(functional_call(model, weights, (x[::2],)), y[::2])
                slopes = torch.autograd.grad(loss, list(weights.values()), create_graph=True)
                weights = {
                    name: value - 0.1 * slope for (name, value), slope in zip(weights.items(), slopes, strict=True)
                }
            step.backward(F.cross_entropy(functional_call(model, weights, (x[1::2],)), y[1::2]), weight=len(y))
        optimizer.step()


@pattern
def first_order_maml_with_a_copy(run: unisono.Run) -> None:
    """Trains a copy of the model on half of the batch by SGD, and gives the model the copy's gradient on the rest."""
    model = perceptron()
    optimizer = AdamW(model.parameters(), lr=0.02)
    run.track(model=model, optimizer=optimizer)
    for step in run.steps(labelled(48), batch_size=24, microbatches=6, epochs=3):
        for x, y in step:
            learner = copy.deepcopy(model)
            inner = SGD(learner.parameters(), lr=0.1)
            for _ in range(2):
                inner.zero_grad()
                F.cross_entropy(learner(x[::2]), y[::2]).backward()
                inner.step()
            slopes = torch.autograd.grad(F.cross_entropy(learner(x[1::2]), y[1::2]), list(learner.parameters()))
            loss = sum((p * slope).sum() for p, slope in zip(model.parameters(), slopes, strict=True))
            step.backward(loss, weight=len(y))
        optimizer.step()


class InputScale(nn.Module):
    """Divides by the largest value of the batches before; the buffer is registered anew with each batch."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        result = x / self.scale
        if self.training:
            self.register_buffer("scale", torch.maximum(0.9 * self.scale, x.detach().abs().max()))
        return result


@pattern
def buffer_registered_anew_in_forward(run: unisono.Run) -> None:
    """Scales inputs by a decaying maximum, which forward registers as a buffer again and again."""
    model = nn.Sequential(InputScale(), perceptron())
    optimizer = AdamW(model.parameters(), lr=0.02)
    run.track(model=model, optimizer=optimizer)
    for step in run.steps(labelled(), batch_size=24, microbatches=6, epochs=2):
        for x, y in step:
            step.backward(F.cross_entropy(model(x), y), weight=len(y))
        optimizer.step()


@pattern
def learning_rate_by_the_time_that_is_left(run: unisono.Run) -> None:
    """Lowers the learning rate linearly over a budget of seconds, for a job with a time limit."""
    model = perceptron()
    optimizer = SGD(model.parameters(), lr=0.1)
    run.track(model=model, optimizer=optimizer)
    began, budget = time.monotonic(), 600.0
    for step in run.steps(labelled(), batch_size=24, microbatches=6, epochs=2):
        for x, y in step:
            step.backward(F.cross_entropy(model(x), y), weight=len(y))
        for group in optimizer.param_groups:
            group["lr"] = 0.1 * max(0.0, 1 - (time.monotonic() - began) / budget)
        optimizer.step()


@pattern
def validation_on_the_shard_of_the_worker(run: unisono.Run) -> None:
    """Validates each worker on its share of the held-out data, and sets the learning rate in proportion to the loss."""
    model = perceptron()
    optimizer = SGD(model.parameters(), lr=0.5)
    run.track(model=model, optimizer=optimizer)
    x_held, y_held = labelled(40).tensors
    for step in run.steps(labelled(), batch_size=24, microbatches=6, epochs=3):
        for x, y in step:
            step.backward(F.cross_entropy(model(x), y), weight=len(y))
        optimizer.step()
        shard = slice(run.rank, None, run.num_workers)
        with torch.no_grad():
            loss = F.cross_entropy(model(x_held[shard]), y_held[shard]).item()
        optimizer.param_groups[0]["lr"] = 0.5 * loss


@pattern
def samples_drawn_by_the_main_worker(run: unisono.Run) -> None:
    """Lets the main worker print a random probe of the model before noise is added to the gradients."""
    model = perceptron()
    optimizer = SGD(model.parameters(), lr=0.1)
    run.track(model=model, optimizer=optimizer)
    for step in run.steps(labelled(), batch_size=24, microbatches=6, epochs=2):
        for x, y in step:
            step.backward(F.cross_entropy(model(x), y), weight=len(y))
        if run.is_main and step.is_last_of_epoch:
            with torch.no_grad():
                print("probe", model(torch.randn(2, 8)).argmax(1).tolist())
        for parameter in model.parameters():
            parameter.grad.add_(torch.randn_like(parameter.grad), alpha=0.01)
        optimizer.step()


@pattern
def curriculum_by_losses_of_the_batches(run: unisono.Run) -> None:
    """Leaves out the hardest samples of a batch; how many depends on the mean of the last ten batch losses."""
    model = perceptron()
    optimizer = AdamW(model.parameters(), lr=0.05)
    run.track(model=model, optimizer=optimizer)
    recent: list[float] = []
    for step in run.steps(labelled(), batch_size=24, microbatches=6, epochs=2):
        for x, y in step:
            losses = F.cross_entropy(model(x), y, reduction="none")
            share = 1.0 if not recent else min(1.0, 0.4 + 0.5 / (sum(recent) / len(recent)))
            kept = losses.sort().values[: max(1, round(share * len(y)))]
            step.backward(kept.mean(), weight=len(kept))
            recent = [*recent, losses.mean().item()][-10:]
        optimizer.step()


@pattern
def compiled_model_under_autocast(run: unisono.Run) -> None:
    """Compiles the model, and computes its forward in bfloat16."""
    model = perceptron(dropout=0.1)
    optimizer = AdamW(model.parameters(), lr=0.02)
    run.track(model=model, optimizer=optimizer)
    compiled = torch.compile(model, backend="eager", dynamic=True)
    for step in run.steps(labelled(), batch_size=24, microbatches=6, epochs=2):
        for x, y in step:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                logits = compiled(x)
            step.backward(F.cross_entropy(logits.float(), y), weight=len(y))
        optimizer.step()


@pattern
def unfreezing_one_layer_after_the_other(run: unisono.Run) -> None:
    """Trains the head alone at first; later the layer below is thawed and gets a parameter group of its own."""
    model = perceptron()
    model[0].requires_grad_(False)
    optimizer = AdamW(model[3].parameters(), lr=0.02)
    run.track(model=model, optimizer=optimizer)
    for step in run.steps(labelled(), batch_size=24, microbatches=6, epochs=2):
        if step.number == 2:
            model[0].requires_grad_(True)
            optimizer.add_param_group({"params": list(model[0].parameters()), "lr": 0.002})
        for x, y in step:
            step.backward(F.cross_entropy(model(x), y), weight=len(y))
        optimizer.step()


class StandardisedLinear(nn.Linear):
    """Its weights have mean 0 and spread 1; the standardised weight is kept while the weight stays the same."""

    def forward(self, x: Tensor) -> Tensor:
        if getattr(self, "_version_of", None) != self.weight._version or not self.training:
            self._version_of = self.weight._version
            centred = self.weight - self.weight.mean(1, keepdim=True)
            self._spread = centred.std(1, keepdim=True).detach()
        centred = self.weight - self.weight.mean(1, keepdim=True)
        return F.linear(x, centred / (self._spread + 1e-5), self.bias)


@pattern
def standardised_weights_with_a_cache(run: unisono.Run) -> None:
    """Standardises weights in forward, and caches their spread until the optimizer has changed them."""
    model = nn.Sequential(StandardisedLinear(8, 16), nn.ReLU(), StandardisedLinear(16, 3))
    optimizer = SGD(model.parameters(), lr=0.05, momentum=0.9)
    run.track(model=model, optimizer=optimizer)
    for step in run.steps(labelled(), batch_size=24, microbatches=6, epochs=2):
        for x, y in step:
            step.backward(F.cross_entropy(model(x), y), weight=len(y))
        optimizer.step()


@pattern
def learning_rate_set_by_the_loss_of_a_batch(run: unisono.Run) -> None:
    """Sets the learning rate in the batch loop, smaller for a batch that has a large loss."""
    model = perceptron()
    optimizer = SGD(model.parameters(), lr=0.1)
    run.track(model=model, optimizer=optimizer)
    for step in run.steps(labelled(), batch_size=24, microbatches=6, epochs=2):
        for x, y in step:
            loss = F.cross_entropy(model(x), y)
            optimizer.param_groups[0]["lr"] = 0.1 / (1 + loss.item())
            step.backward(loss, weight=len(y))
        optimizer.step()


@pattern
def early_stopping_decided_by_the_main_worker(run: unisono.Run) -> None:
    """Stops as soon as the loss is small enough, which the main worker looks at."""
    model = perceptron()
    optimizer = SGD(model.parameters(), lr=1.0)
    run.track(model=model, optimizer=optimizer)
    for step in run.steps(labelled(), batch_size=24, microbatches=6, epochs=8):
        for x, y in step:
            step.backward(F.cross_entropy(model(x), y), weight=len(y))
        optimizer.step()
        if run.is_main and step.loss < 0.3:
            print(f"stopped after {step.number + 1} steps")
            break


@pattern
def running_mean_in_a_file(run: unisono.Run) -> None:
    """Keeps the running mean of the inputs in a file of the run, so that a restarted job finds it."""
    model = perceptron()
    optimizer = AdamW(model.parameters(), lr=0.02)
    run.track(model=model, optimizer=optimizer)
    path = run.directory / "mean.json"
    for step in run.steps(labelled(), batch_size=24, microbatches=6, epochs=2):
        for x, y in step:
            mean = torch.tensor(json.loads(path.read_text())) if path.exists() else x.mean(0)
            mean = 0.9 * mean + 0.1 * x.mean(0)
            written = path.with_name(f"mean-{os.getpid()}")
            written.write_text(json.dumps(mean.tolist()))
            written.replace(path)
            step.backward(F.cross_entropy(model(x - mean), y), weight=len(y))
        optimizer.step()
