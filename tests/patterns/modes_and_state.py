"""Modes, attributes and other state that is in no `state_dict`; and evaluations beside the training that read it.

What changes, changes in the second step: a worker that joins after it, and a run that resumes later, have not seen it.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR, ExponentialLR

import unisono
from tests.patterns.corpus import labelled, num_correct, pattern, perceptron

BOTH = ("resumed", "replaced")
ALONE_AGAIN = ("resumed",)
"""Where a newcomer has another state: it is sent away, and the other two of three wait for a third."""


def normalised(width: int = 16, dropout: float = 0.0) -> nn.Sequential:
    """A perceptron with BatchNorm."""
    layers = [nn.Linear(8, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Dropout(dropout), nn.Linear(width, 3)]
    return nn.Sequential(*layers)


# -- modes -------------------------------------------------------------------------------------------


@pattern(legs=BOTH)
def batch_norm_frozen_from_the_second_step(run: unisono.Run) -> None:
    """Freezes the running statistics of BatchNorm by `eval()` after the first step."""
    model = normalised()
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
    run.track(model=model, optimizer=optimizer)
    for step in run.steps(labelled(), batch_size=24, microbatches=6, epochs=2):
        if step.number == 1:
            for module in model.modules():
                if isinstance(module, nn.BatchNorm1d):
                    module.eval()
        for x, y in step:
            F.cross_entropy(model(x), y).backward()
        optimizer.step()


@pattern(legs=BOTH)
def eval_left_on_after_a_look_at_the_outputs(run: unisono.Run) -> None:
    """Looks at the outputs after the second step with `model.eval()`, and forgets `model.train()`."""
    model = normalised(dropout=0.3)
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
    run.track(model=model, optimizer=optimizer)
    samples = labelled().tensors[0]
    for step in run.steps(labelled(), batch_size=24, microbatches=6, epochs=2):
        for x, y in step:
            F.cross_entropy(model(x), y).backward()
        optimizer.step()
        if step.number == 1:
            model.eval()
            with torch.no_grad():
                print(model(samples).argmax(1).bincount())


@pattern(legs=BOTH)
def body_thawed_and_put_into_train_mode(run: unisono.Run) -> None:
    """Fine-tunes the head on a frozen body in eval mode; thaws the body, and puts it into train mode, a step later."""
    model = normalised(dropout=0.3)
    body = model[:4]
    body.requires_grad_(False).eval()
    optimizer = AdamW(model.parameters(), lr=0.02)
    run.track(model=model, optimizer=optimizer)
    for step in run.steps(labelled(), batch_size=24, microbatches=6, epochs=2):
        if step.number == 1:
            body.requires_grad_(True).train()
        for x, y in step:
            F.cross_entropy(model(x), y).backward()
        optimizer.step()


@pattern(legs=BOTH)
def dropout_lowered_after_a_step(run: unisono.Run) -> None:
    """Sets `p` of the dropout to another number, once."""
    model = perceptron(dropout=0.5)
    optimizer = SGD(model.parameters(), lr=0.1)
    run.track(model=model, optimizer=optimizer)
    for step in run.steps(labelled(), batch_size=24, microbatches=6, epochs=2):
        if step.number == 1:
            for module in model.modules():
                if isinstance(module, nn.Dropout):
                    module.p = 0.1
        for x, y in step:
            F.cross_entropy(model(x), y).backward()
        optimizer.step()


@pattern(legs=BOTH)
def momentum_of_batch_norm_by_the_epoch(run: unisono.Run) -> None:
    """Lowers the momentum of BatchNorm at the head of each epoch, as a function of its number (PointNet)."""
    model = normalised()
    optimizer = SGD(model.parameters(), lr=0.1)
    run.track(model=model, optimizer=optimizer)
    for epoch in run.epochs(2):
        for module in model.modules():
            if isinstance(module, nn.BatchNorm1d):
                module.momentum = max(0.5 * 0.5**epoch, 0.01)
        for step in run.steps(labelled(), batch_size=24, microbatches=6):
            for x, y in step:
                F.cross_entropy(model(x), y).backward()
            optimizer.step()


# -- attributes --------------------------------------------------------------------------------------


class Tempered(nn.Module):
    """Divides its logits by a temperature, and skips a layer while it is warming up."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.skipped, self.head = nn.Linear(8, 16), nn.Linear(16, 16), nn.Linear(16, 3)
        self.temperature = 4.0
        self.is_warming_up = True
        self.centre = torch.zeros(8)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.relu(self.body(x - self.centre))
        if not self.is_warming_up:
            hidden = hidden + torch.relu(self.skipped(hidden))
        logits: Tensor = self.head(hidden) / self.temperature
        return logits


@pattern(legs=BOTH)
def temperature_annealed_in_an_attribute(run: unisono.Run) -> None:
    """Multiplies a temperature, which is an attribute of the model, by 0.8 after each step."""
    model = Tempered()
    optimizer = SGD(model.parameters(), lr=0.1)
    run.track(model=model, optimizer=optimizer)
    for step in run.steps(labelled(), batch_size=24, microbatches=6, epochs=2):
        for x, y in step:
            F.cross_entropy(model(x), y).backward()
        optimizer.step()
        model.temperature *= 0.8


@pattern(legs=BOTH)
def flag_that_changes_the_forward_pass(run: unisono.Run) -> None:
    """Ends the warm-up by a flag in the model, when the loss of a step says so."""
    model = Tempered()
    optimizer = SGD(model.parameters(), lr=0.1)
    run.track(model=model, optimizer=optimizer)
    for step in run.steps(labelled(), batch_size=24, microbatches=6, epochs=2):
        for x, y in step:
            F.cross_entropy(model(x), y).backward()
        optimizer.step()
        if step.number == 1 and step.loss < 10:
            model.is_warming_up = False


@pattern(legs=BOTH)
def centre_in_an_attribute_that_is_a_tensor(run: unisono.Run) -> None:
    """Follows the mean of the inputs in a tensor of the model that is no buffer, by the sums of the steps."""
    model = Tempered()
    optimizer = SGD(model.parameters(), lr=0.1)
    run.track(model=model, optimizer=optimizer)
    for step in run.steps(labelled(), batch_size=24, microbatches=6, epochs=2):
        for x, y in step:
            F.cross_entropy(model(x), y).backward()
            step.add(inputs=x.sum(0), seen=len(x))
        optimizer.step()
        mean = (step.totals["inputs"] / step.totals["seen"]).float()
        model.centre = 0.5 * model.centre + 0.5 * mean


@pattern(legs=ALONE_AGAIN)
def clipping_by_the_median_of_a_deque(run: unisono.Run) -> None:
    """AutoClip: clips to the median of the last norms, which are in a deque."""
    model = perceptron()
    optimizer = SGD(model.parameters(), lr=0.1)
    run.track(model=model, optimizer=optimizer)
    norms: deque[float] = deque(maxlen=4)
    for step in run.steps(labelled(), batch_size=24, microbatches=6, epochs=2):
        for x, y in step:
            F.cross_entropy(model(x), y).backward()
        norms.append(float(nn.utils.get_total_norm([p.grad for p in model.parameters()])))
        nn.utils.clip_grad_norm_(model.parameters(), 0.5 * sorted(norms)[len(norms) // 2])
        optimizer.step()


class Balance:
    """How much the second loss counts: more as long as it does not fall."""

    def __init__(self) -> None:
        self.factor, self.last = 1.0, float("inf")

    def update(self, loss: float) -> None:
        self.factor *= 1.5 if loss < self.last else 0.5
        self.last = loss


@pattern(legs=ALONE_AGAIN)
def factor_of_a_loss_in_an_object(run: unisono.Run) -> None:
    """Adapts the factor of a second loss by the loss of the step; an object of the script remembers both."""
    model, balance = perceptron(), Balance()
    optimizer = SGD(model.parameters(), lr=0.1)
    run.track(model=model, optimizer=optimizer)
    for step in run.steps(labelled(), batch_size=24, microbatches=6, epochs=2):
        for x, y in step:
            logits = model(x)
            (F.cross_entropy(logits, y) + 0.1 * balance.factor * logits.square().mean()).backward()
        optimizer.step()
        balance.update(step.loss)


@pattern(legs=BOTH)
def layers_in_a_plain_list(run: unisono.Run) -> list[Tensor]:
    """Keeps its layers in a list that is no ModuleList; the optimizer gets their parameters by hand."""
    head = nn.Linear(16, 3)
    layers = [nn.Linear(8, 16), nn.Linear(16, 16)]
    parameters = [*head.parameters(), *(p for layer in layers for p in layer.parameters())]
    optimizer = SGD(parameters, lr=0.1, momentum=0.9)
    run.track(model=head, optimizer=optimizer)
    for step in run.steps(labelled(), batch_size=24, microbatches=6, epochs=2):
        for x, y in step:
            hidden = x
            for layer in layers:
                hidden = torch.relu(layer(hidden))
            F.cross_entropy(head(hidden), y).backward()
        optimizer.step()
    return [parameter.detach() for parameter in parameters]


# -- optimizers --------------------------------------------------------------------------------------


@pattern(legs=ALONE_AGAIN)
def scheduler_made_anew_in_each_epoch(run: unisono.Run) -> None:
    """Makes a cosine schedule at the head of each epoch, which follows the steps of that epoch."""
    model = perceptron()
    optimizer = SGD(model.parameters(), lr=0.2)
    run.track(model=model, optimizer=optimizer)
    for epoch in run.epochs(2):
        optimizer.param_groups[0]["lr"] = optimizer.param_groups[0]["initial_lr"] = 0.2 / (1 + epoch)
        scheduler = CosineAnnealingLR(optimizer, T_max=3)
        for step in run.steps(labelled(), batch_size=24, microbatches=6):
            for x, y in step:
                F.cross_entropy(model(x), y).backward()
            optimizer.step()
            scheduler.step()


class SAM(Optimizer):
    """As published: climbs, and comes back to step by a base optimizer, whose state is not in its own."""

    def __init__(self, params: Iterable[nn.Parameter], base_optimizer: Any, rho: float = 0.05, **kwargs: Any) -> None:
        super().__init__(params, dict(rho=rho, **kwargs))
        self.base_optimizer = base_optimizer(self.param_groups, **kwargs)
        self.param_groups = self.base_optimizer.param_groups
        self.defaults.update(self.base_optimizer.defaults)

    @torch.no_grad()
    def first_step(self) -> None:
        parameters = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        scale = 0.05 / (nn.utils.get_total_norm([p.grad for p in parameters]) + 1e-12)
        for p in parameters:
            self.state[p]["old_p"] = p.data.clone()
            p.add_(p.grad * scale)

    @torch.no_grad()
    def second_step(self) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                p.data = self.state[p]["old_p"]
        self.base_optimizer.step()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self.base_optimizer.param_groups = self.param_groups


@pattern(legs=ALONE_AGAIN)
def sam_with_a_base_optimizer(run: unisono.Run) -> None:
    """SAM by the class that everybody copies, with momentum in the base optimizer, and two passes a batch."""
    model = perceptron()
    optimizer = SAM(model.parameters(), SGD, lr=0.1, momentum=0.9)
    run.track(model=model, optimizer=optimizer)
    for step in run.steps(labelled(), batch_size=24, microbatches=6, epochs=2):
        for x, y in step:
            F.cross_entropy(model(x), y).backward()
        optimizer.first_step()
        for x, y in step.again():
            F.cross_entropy(model(x), y).backward()
        optimizer.second_step()


class Lookahead:
    """Goes halfway back to slow weights every other step; all it needs is in its state."""

    def __init__(self, optimizer: Optimizer, k: int = 2) -> None:
        self.optimizer, self.k, self.count = optimizer, k, 0
        self._params = [p for group in optimizer.param_groups for p in group["params"]]
        self.slow = [p.detach().clone() for p in self._params]

    @torch.no_grad()
    def step(self) -> None:
        self.optimizer.step()
        self.count += 1
        if self.count % self.k == 0:
            for slow, fast in zip(self.slow, self._params, strict=True):
                slow.lerp_(fast, 0.5)
                fast.copy_(slow)

    def state_dict(self) -> dict[str, Any]:
        return {"base": self.optimizer.state_dict(), "slow": self.slow, "count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.optimizer.load_state_dict(state["base"])
        self.slow, self.count = [one.clone() for one in state["slow"]], state["count"]


@pattern(legs=BOTH)
def lookahead_around_another_optimizer(run: unisono.Run) -> None:
    """A Lookahead that is no `torch.optim.Optimizer`, with a `state_dict` of tensors, a count and the base's state."""
    model = perceptron()
    optimizer = Lookahead(SGD(model.parameters(), lr=0.1, momentum=0.9))
    run.track(model=model, optimizer=optimizer)
    for step in run.steps(labelled(), batch_size=24, microbatches=6, epochs=2):
        for x, y in step:
            F.cross_entropy(model(x), y).backward()
        optimizer.step()


class Madgrad(Optimizer):
    """Its step count is under a string in `state`, beside the parameters."""

    def __init__(self, params: Iterable[nn.Parameter], lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        if "k" not in self.state:
            self.state["k"] = torch.tensor([0], dtype=torch.long)
        rate = float(self.state["k"].item() + 1) ** 0.5
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state.update(sum=torch.zeros_like(p), squares=torch.zeros_like(p), x0=p.detach().clone())
                state["sum"].add_(p.grad, alpha=group["lr"] * rate)
                state["squares"].addcmul_(p.grad, p.grad, value=group["lr"] * rate)
                target = state["x0"] - state["sum"] / (state["squares"].pow(1 / 3) + 1e-3)
                p.lerp_(target, 0.1)
        self.state["k"] += 1


@pattern(legs=BOTH)
def optimizer_with_a_string_in_its_state(run: unisono.Run) -> None:
    """An optimizer like MADGRAD, with `optimizer.state["k"]`."""
    model = perceptron()
    optimizer = Madgrad(model.parameters(), lr=0.05)
    run.track(model=model, optimizer=optimizer)
    for step in run.steps(labelled(), batch_size=24, microbatches=6, epochs=2):
        for x, y in step:
            F.cross_entropy(model(x), y).backward()
        optimizer.step()


@pattern(legs=BOTH)
def betas_changed_by_the_script(run: unisono.Run) -> None:
    """Gives AdamW other betas, and another weight decay, after the first step."""
    model = perceptron()
    optimizer = AdamW(model.parameters(), lr=0.02, betas=(0.8, 0.9))
    run.track(model=model, optimizer=optimizer)
    for step in run.steps(labelled(), batch_size=24, microbatches=6, epochs=2):
        if step.number == 1:
            optimizer.param_groups[0].update(betas=(0.9, 0.99), weight_decay=0.1)
        for x, y in step:
            F.cross_entropy(model(x), y).backward()
        optimizer.step()


class Average:
    """An exponential moving average with a warm-up; only the weights are in its state."""

    def __init__(self, model: nn.Module) -> None:
        self.module, self.decay = copy.deepcopy(model), 0.0

    @torch.no_grad()
    def update(self, model: nn.Module) -> None:
        for mean, value in zip(self.module.parameters(), model.parameters(), strict=True):
            mean.lerp_(value, 1 - self.decay)
        self.decay = min(0.99, self.decay + 0.2)

    def state_dict(self) -> dict[str, Any]:
        return self.module.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.module.load_state_dict(state)


@pattern(legs=ALONE_AGAIN)
def average_whose_decay_is_an_attribute(run: unisono.Run) -> dict[str, Any]:
    """An EMA of the weights whose decay grows with each update, outside of its `state_dict`; validates with it."""
    model = perceptron()
    average = Average(model)
    optimizer = SGD(model.parameters(), lr=0.1)
    run.track(model=model, average=average, optimizer=optimizer)
    for step in run.steps(labelled(), batch_size=24, microbatches=6, epochs=2):
        for x, y in step:
            F.cross_entropy(model(x), y).backward()
        optimizer.step()
        average.update(model)
    return run.evaluate(labelled(), lambda batch: num_correct(average.module, batch), batch_size=10)


# -- models ------------------------------------------------------------------------------------------


@pattern(legs=("replaced",))
def scripted_part_of_a_model(run: unisono.Run) -> None:
    """A part of the model is TorchScript."""
    model = nn.Sequential(torch.jit.script(nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16))), nn.Linear(16, 3))
    optimizer = SGD(model.parameters(), lr=0.1)
    run.track(model=model, optimizer=optimizer)
    for step in run.steps(labelled(), batch_size=24, microbatches=6, epochs=2):
        for x, y in step:
            F.cross_entropy(model(x), y).backward()
        optimizer.step()


@pattern(legs=BOTH)
def head_replaced_between_two_epochs(run: unisono.Run) -> None:
    """Replaces the head of the model after the first epoch, and gives the optimizer the new parameters."""
    model = perceptron()
    optimizer = SGD(model.parameters(), lr=0.1)
    run.track(model=model, optimizer=optimizer)
    for epoch in run.epochs(2):
        if epoch == 1:
            model[3] = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 3))
            optimizer.param_groups[0]["params"] = list(model.parameters())
        for step in run.steps(labelled(), batch_size=24, microbatches=6):
            for x, y in step:
                F.cross_entropy(model(x), y).backward()
            optimizer.step()


# -- evaluations beside the training -----------------------------------------------------------------


def train_and_evaluate(run: unisono.Run, model: nn.Module, optimizer: Optimizer, count: Any, after: Any) -> list[Any]:
    """Evaluate beside the training after the fourth step, and ask for the totals at the end; ``after`` each update."""
    for step in run.steps(labelled(), batch_size=24, microbatches=6, epochs=2):
        for x, y in step:
            F.cross_entropy(model(x), y).backward()
        optimizer.step()
        after(step)
        if step.number == 3:
            run.evaluate(labelled(30), count, batch_size=10, wait=False)
    return [(one.step, one.result()) for one in run.pending_evaluations]


@pattern(legs=("evaluator",))
def evaluation_that_reads_the_learning_rate(run: unisono.Run) -> list[Any]:
    """Totals beside the training by a function that looks at `lr`, which a line of the script changes."""
    model = perceptron()
    optimizer = SGD(model.parameters(), lr=0.2)
    run.track(model=model, optimizer=optimizer)

    def halve(_: unisono.Step) -> None:
        optimizer.param_groups[0]["lr"] *= 0.5

    def count(batch: Any) -> dict[str, Any]:
        return {**num_correct(model, batch), "lr": optimizer.param_groups[0]["lr"]}

    return train_and_evaluate(run, model, optimizer, count, halve)


@pattern(legs=("evaluator",))
def evaluation_by_a_scheduler(run: unisono.Run) -> list[Any]:
    """Perturbs the inputs less and less, by a tracked scheduler, in an evaluation beside the training."""
    model = perceptron()
    optimizer = SGD(model.parameters(), lr=0.2)
    scheduler = ExponentialLR(optimizer, 0.5)
    run.track(model=model, optimizer=optimizer, scheduler=scheduler)

    def count(batch: Any) -> dict[str, Any]:
        return num_correct(model, (batch[0] + scheduler.get_last_lr()[0] + scheduler.last_epoch, batch[1]))

    return train_and_evaluate(run, model, optimizer, count, lambda step: scheduler.step())


@pattern(legs=("evaluator",))
def evaluation_with_an_attribute_of_the_model(run: unisono.Run) -> list[Any]:
    """The temperature of the model, an attribute, falls from step to step; evaluations beside the training use it."""
    model = Tempered()
    optimizer = SGD(model.parameters(), lr=0.2)
    run.track(model=model, optimizer=optimizer)

    def anneal(_: unisono.Step) -> None:
        model.temperature *= 0.8

    return train_and_evaluate(run, model, optimizer, lambda batch: num_correct(model, batch), anneal)


@pattern(legs=("evaluator",))
def evaluation_by_a_tracked_dict(run: unisono.Run) -> list[Any]:
    """A threshold in a tracked dict follows the losses; evaluations beside the training count what is above it."""
    model, kept = perceptron(), {"threshold": 0.0}
    optimizer = SGD(model.parameters(), lr=0.2)
    run.track(model=model, optimizer=optimizer, kept=kept)

    def follow(step: unisono.Step) -> None:
        kept["threshold"] = 0.5 * kept["threshold"] + 0.5 * step.loss

    def count(batch: Any) -> dict[str, Any]:
        return {"above": (model(batch[0]).amax(1) > kept["threshold"]).sum(), "threshold": kept["threshold"]}

    return train_and_evaluate(run, model, optimizer, count, follow)


@pattern(legs=("evaluator",))
def evaluation_with_an_untracked_dict(run: unisono.Run) -> list[Any]:
    """The same, with a dict that is not tracked."""
    model, kept = perceptron(), {"threshold": 0.0}
    optimizer = SGD(model.parameters(), lr=0.2)
    run.track(model=model, optimizer=optimizer)

    def follow(step: unisono.Step) -> None:
        kept["threshold"] = 0.5 * kept["threshold"] + 0.5 * step.loss

    def count(batch: Any) -> dict[str, Any]:
        return {"above": (model(batch[0]).amax(1) > kept["threshold"]).sum(), "threshold": kept["threshold"]}

    return train_and_evaluate(run, model, optimizer, count, follow)


@pattern(legs=("evaluator", "replaced"))
def rate_decided_by_an_evaluation_of_the_step_before(run: unisono.Run) -> list[Any]:
    """Asks for the totals one step after the call, sets the rate by them, and stops where all is right."""
    model = normalised()
    optimizer = SGD(model.parameters(), lr=0.2)
    run.track(model=model, optimizer=optimizer)
    for step in run.steps(labelled(), batch_size=24, microbatches=6, epochs=2):
        for x, y in step:
            F.cross_entropy(model(x), y).backward()
        optimizer.step()
        rights = [one.result()["correct"] for one in run.pending_evaluations]
        if rights:
            optimizer.param_groups[0]["lr"] = 0.2 * (1 - rights[-1] / 60)
        if rights[-1:] == [30]:
            break
        if step.number in {1, 3}:
            run.evaluate(labelled(30), lambda batch: num_correct(model, batch), batch_size=10, wait=False)
    return [one.result() for one in run.pending_evaluations]
