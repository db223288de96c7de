"""One copy of the parameters a host: the workers map one memory, and each may write as if it were its own."""

from __future__ import annotations

import functools
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim
from torch.nn import functional as F

import unisono
from tests.workers.models import Mlp, bits_of, vectors
from tests.workers.processes import Seat
from tests.workers.static_team import AloneRun, Place, train_on
from unisono.strategies.shard.hosting import HostMemory, check_hosted, is_mapped, mapped

pytestmark = pytest.mark.more


def place_of(tensor: Tensor) -> tuple[str, int]:
    """The file that a tensor lies in, and where: equal in two processes where these share the memory."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        where, _, offset, _, inode, *_ = line.split()
        first, end = (int(one, 16) for one in where.split("-"))
        if first <= tensor.data_ptr() < end:
            return inode, int(offset, 16) + tensor.data_ptr() - first
    raise AssertionError("a tensor lies nowhere")


def train(run: unisono.Run, *, clamps: bool = False, freezes: bool = False, **options: Any) -> dict[str, Any]:
    """A training in which the script itself changes parameters, and a layer is frozen for some steps."""
    model = Mlp()
    optimizer = optim.AdamW(model.parameters(), lr=0.02)
    if options:
        optimizer = unisono.shard(optimizer, **options)
    run.track(model=model, optimizer=optimizer)
    parameters = list(model.parameters())
    places = []
    for step in run.steps(vectors(), batch_size=24, microbatches=6, epochs=2):
        if freezes:
            parameters[0].requires_grad_(step.number not in (1, 2))
        for x, y in step:
            F.cross_entropy(model(x), y).backward()
        optimizer.step()
        if clamps and step.number % 2:
            with torch.no_grad():
                for parameter in parameters:
                    parameter.mul_(0.9).clamp_(-0.2, 0.2)
                parameters[-1].data.add_(0.01)
        places.append([place_of(one) for one in parameters])
    found = bits_of(model.state_dict())
    return {"bits": found, "places": places, "mapped": [is_mapped(one) for one in parameters], "model": model}


def _train(seat: Seat, place: Place, options: dict[str, Any]) -> dict[str, Any]:
    with place.run(seed=3) as run:
        found = train(run, **options)
    model = found.pop("model")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(seat.rank)
    return {**found, "after": {float(one.min()) for one in model.parameters()}}


@functools.cache
def alone(**options: Any) -> str:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    with AloneRun(seed=3) as run:
        found = train(run, **options)["bits"]
    torch.set_num_threads(before)
    return str(found)


@pytest.mark.parametrize("copies", [1, 2])
@pytest.mark.parametrize("kind", ["shared", "gloo"])
def test_the_workers_of_a_host_map_one_memory(kind: str, copies: int) -> None:
    """Each parameter lies at one place for all. It changes places in each step, and comes back in the next but one."""
    results = train_on(kind, 3, _train, {"copies": copies, "parameters": "host"})
    for each in results:
        assert each["mapped"] == [True] * len(each["mapped"])
        assert each["places"] == results[0]["places"]
        assert each["bits"] == alone()
    first, second, third, *_ = results[0]["places"]
    assert all(a != b and a == c for a, b, c in zip(first, second, third, strict=True))


def test_what_a_script_writes_into_parameters_is_written_once_on_each_worker() -> None:
    """A product would be wrong if two workers of a host applied it to one memory; so would what one of them wrote to
    memory that it gets back two steps later.
    """
    options = {"clamps": True}
    results = train_on("shared", 3, _train, {"copies": 2, "parameters": "host", **options})
    assert {each["bits"] for each in results} == {alone(**options)}
    assert [each["after"] for each in results] == [{0.0}, {1.0}, {2.0}]


def test_a_parameter_without_a_gradient_stays_where_it_is() -> None:
    options = {"freezes": True}
    results = train_on("shared", 2, _train, {"copies": 1, "parameters": "host", **options})
    assert {each["bits"] for each in results} == {alone(**options)}
    for each in results:
        before, frozen, still, *_ = each["places"]
        assert before[0] == frozen[0] == still[0]
        assert before[1] != frozen[1]


def test_a_worker_that_is_alone_on_its_host_shares_nothing() -> None:
    with AloneRun(seed=3) as run:
        found = train(run, copies=2, parameters="host")
    assert found["mapped"] == [False] * len(found["mapped"])


# -- the memory --------------------------------------------------------------------------------------


def parameters_of(*shapes: tuple[int, ...]) -> list[nn.Parameter]:
    return [nn.Parameter(torch.randn(shape)) for shape in shapes]


def test_new_values_never_lie_where_those_that_count_do() -> None:
    parameters = parameters_of((3, 4), (5,), (0,), ())
    memory = HostMemory()
    seen: list[dict[int, Tensor]] = []
    for turn in range(4):
        places = memory.places(parameters, [0, 1, 2, 3])
        assert sorted(places) == [0, 1, 3]  # what has no elements has no place
        for place in places.values():
            place.fill_(turn)
        (written,) = memory.written(places)
        seen.append(mapped(parameters, written))
        if turn:
            assert all(bool((one == turn - 1).all()) for one in seen[-2].values())
        memory.commit(places)
    partly = memory.places(parameters, [1])
    partly[1].fill_(9.0)
    memory.commit([1])
    memory.places(parameters, [0, 1])[0].fill_(8.0)
    assert [one.parameters for one in memory.written([0, 1])] == [[0], [1]]
    assert float(seen[-1][0][0, 0]) == 3.0
    memory.close()
    assert all(bool((one == 3).all()) for one in seen[-1].values())


def test_a_mapping_has_the_strides_of_its_parameter_and_a_storage_of_its_own() -> None:
    parameters = [nn.Parameter(torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last)), *parameters_of((7,))]
    memory = HostMemory()
    for index, place in memory.places(parameters, [0, 1]).items():
        place.copy_(parameters[index].detach())
    (written,) = memory.written([0, 1])
    for index, value in mapped(parameters, written).items():
        assert value.stride() == parameters[index].stride()
        assert bits_of(value) == bits_of(parameters[index].detach())
        assert value.untyped_storage().nbytes() == value.nbytes
        assert value.storage_offset() == 0
    memory.close()


def test_what_cannot_be_shared_is_refused() -> None:
    first, second = parameters_of((4, 4), (3,))
    check_hosted("optimizer", [first, second], {"model.buffer": torch.zeros(3)})
    with pytest.raises(unisono.UsageError, match=r"parameter 1 of optimizer lies in the same memory as 'model.buffer'"):
        check_hosted("optimizer", [first, second], {"model.buffer": second.detach()})
    half = nn.Parameter(first.detach()[:2])
    with pytest.raises(unisono.UsageError, match="parameter 1 of optimizer lies in the same memory as parameter 0"):
        check_hosted("optimizer", [first, half], {})
    wide = nn.Parameter(torch.zeros(1).expand(5))
    with pytest.raises(unisono.UsageError, match=re.escape("not side by side (strides (0,))")):
        check_hosted("optimizer", [wide], {})
    with pytest.raises(unisono.UsageError, match="parameter 0 of optimizer is on meta"):
        check_hosted("optimizer", [nn.Parameter(torch.empty(3, device="meta"))], {})


@pytest.mark.parametrize("given", [{"parameters": "hosts"}, {"gradients": "owner"}])
def test_a_word_that_is_none_of_the_two_is_refused(given: dict[str, Any]) -> None:
    (name,) = given
    with pytest.raises(unisono.UsageError, match=f'{name} is "worker" or "'):
        unisono.shard(optim.SGD(parameters_of((3,)), lr=0.1), **given)
