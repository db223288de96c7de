"""What of a worker's memory is what, by the objects that it tracks."""

from __future__ import annotations

import torch
from torch import nn
from torch.utils.data import TensorDataset

import unisono
from unisono.engine.exchange.slots import Slots
from unisono.engine.rounds.team import Team
from unisono.engine.state.tracked import Tracked
from unisono.script.worker_troubles import MemoryAtStart, data_bytes, held_now, kinds

CPU = torch.device("cpu")
MB = 10**6


class Images:
    def __init__(self) -> None:
        self.images = torch.zeros(500, 1000)
        self.labels = [torch.zeros(100) for _ in range(10)]
        self.name = "images"


def tracked(optimizer: type[torch.optim.Optimizer] = torch.optim.AdamW, **options: float) -> Tracked:
    found = Tracked()
    model = nn.Sequential(nn.Linear(500, 500, bias=False), nn.BatchNorm1d(500))
    found.add({"model": model, "optimizer": optimizer(model.parameters(), **options)})  # type: ignore[call-arg]
    return found


def test_parameters_data_and_the_state_of_the_optimizer_are_told_apart() -> None:
    objects = tracked()
    (optimizer,) = objects.optimizers.values()
    for _, parameter in objects.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    found = kinds(objects, Slots(), MemoryAtStart(used=300 * MB, data=100 * MB), Team(CPU))
    assert found["parameters"] == 4 * (500 * 500 + 1000)
    assert found["data set"] == 100 * MB
    assert 2 * found["parameters"] <= found["optimizer state"] < 2 * found["parameters"] + 100
    assert found["the program itself"] + found["data set"] + found["parameters"] + found["buffers"] == 300 * MB


def test_what_an_optimizer_will_need_from_its_first_update_on_is_known_before() -> None:
    name = "optimizer state, from the first update on"
    adam, plain = (
        kinds(tracked(), Slots(), MemoryAtStart(), Team(CPU)),
        kinds(tracked(torch.optim.SGD, lr=0.1), Slots(), MemoryAtStart(), Team(CPU)),
    )
    assert adam[name] == 2 * adam["parameters"]
    assert name not in plain
    momentum = kinds(tracked(torch.optim.SGD, lr=0.1, momentum=0.9), Slots(), MemoryAtStart(), Team(CPU))
    assert momentum[name] == momentum["parameters"]


def test_of_a_sharded_optimizer_only_the_own_states_count() -> None:
    """Also before the first update, when nobody has any."""
    name, team = "optimizer state, from the first update on", Team(CPU)
    team.worker_ids, team.hosts = ("w0", "w1", "w2", "w3"), ("",) * 4
    objects = Tracked()
    model = nn.Sequential(*(nn.Linear(100, 100, bias=False) for _ in range(8)))
    objects.add({"model": model, "optimizer": unisono.shard(torch.optim.AdamW(model.parameters()), copies=1)})
    found = []
    for rank in range(4):
        team.rank = rank
        found.append(kinds(objects, Slots(), MemoryAtStart(), team))
    assert [one[name] for one in found] == [2 * 2 * 4 * 100 * 100] * 4
    assert sum(one[name] for one in found) == 2 * found[0]["parameters"]


def test_the_memory_of_a_data_set_is_that_of_its_tensors() -> None:
    assert data_bytes(torch.zeros(10, 10), CPU) == 400
    assert data_bytes(TensorDataset(torch.zeros(10, 10), torch.zeros(10)), CPU) == 440
    assert data_bytes(Images(), CPU) == 4 * (500_000 + 1000)
    assert data_bytes([torch.zeros(100)] * 5000, CPU) == 400 * 5000
    assert data_bytes([1, 2, 3], CPU) == 0
    assert data_bytes(Images(), torch.device("cuda")) == 0, "it is not there"


def test_the_largest_tensors_have_names() -> None:
    held = held_now(tracked(), Slots(), CPU, MemoryAtStart(), Team(CPU), asked=5, num_workers=1)
    assert held.biggest[0] == ("model.0.weight (500, 500) float32", 1_000_000)
    assert held.used > 10 * MB
    assert held.limit >= held.used
