"""What others do with the same training: sides of `benchmarks.step_time` beside DistributedDataParallel.

Each takes part where its package can be imported; `missing` says which one cannot, and `python -m benchmarks.night`
writes that down. All have the model, the data, the optimizer and the process group of `benchmarks.sides`: gloo, one
thread a process, deterministic kernels.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.models import Case
from benchmarks.sides import Control, adamw, loop, shares

__all__ = ["NEEDS", "PEERS", "missing", "summed_by", "torchft_manager"]

Peer = Callable[..., None]


def with_zero(case: Case, microbatches: int, control: Control, *, rank: int, size: int) -> None:
    """DistributedDataParallel with torch's ZeroRedundancyOptimizer."""
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model = DistributedDataParallel(case.model(), gradient_as_bucket_view=True)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), optimizer_class=torch.optim.AdamW, lr=1e-4, fused=True)
    control.hello(rank)
    loop(
        model, case, microbatches, control, rank=rank, size=size, optimizer=optimizer,
        accumulate=lambda is_last: nullcontext() if is_last else model.no_sync(),
    )  # fmt: skip


def with_fsdp(case: Case, microbatches: int, control: Control, *, rank: int, size: int) -> None:
    """FSDP2 (``fully_shard``), each block by itself; gradients are reduced once in a step."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (size,))
    model = case.model()
    blocks: list[nn.Module] = [each for each in model.modules() if isinstance(each, nn.TransformerEncoderLayer)]
    for block in blocks or [each for each in model.children() if any(True for _ in each.parameters())]:
        fully_shard(block, mesh=mesh)
    sharded = fully_shard(model, mesh=mesh)

    def accumulate(is_last: bool) -> AbstractContextManager[None]:
        sharded.set_requires_gradient_sync(is_last)
        return nullcontext()

    control.hello(rank)
    loop(model, case, microbatches, control, rank=rank, size=size, accumulate=accumulate)


def with_accelerate(case: Case, microbatches: int, control: Control, *, rank: int, size: int) -> None:
    """The loop of Accelerate's documentation: ``accumulate``, ``backward``."""
    from accelerate import Accelerator

    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(size))
    os.environ.setdefault("MASTER_ADDR", "localhost")  # looked at, and not used: the group is there
    os.environ.setdefault("MASTER_PORT", "0")
    own = microbatches // size
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=own)
    plain = case.model()
    model, optimizer = accelerator.prepare(plain, adamw(plain))
    if not isinstance(model, DistributedDataParallel):
        raise RuntimeError("accelerate has not made several processes one training")
    parts = shares(case, microbatches, rank, size)
    control.hello(rank)
    while control.go_on():
        for fetch in next(parts):
            inputs, labels = fetch()
            with accelerator.accumulate(model):
                accelerator.backward(case.loss(model, inputs, labels))
                optimizer.step()
                optimizer.zero_grad()


def with_lightning(case: Case, microbatches: int, control: Control, *, rank: int, size: int) -> None:
    """Lightning's ``Trainer`` with its DDP strategy, and nothing that it logs, saves or shows."""
    import lightning
    from lightning.fabric.plugins.environments import TorchElasticEnvironment
    from lightning.pytorch.strategies import DDPStrategy
    from torch.utils.data import DataLoader, IterableDataset

    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(size), LOCAL_WORLD_SIZE=str(size))
    own = microbatches // size

    class Data(IterableDataset[Any]):
        def __iter__(self) -> Iterator[Any]:
            for part in shares(case, microbatches, rank, size):
                for fetch in part:
                    yield fetch()

    class Module(lightning.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.model = case.model()

        def training_step(self, batch: tuple[Tensor, Tensor], _: int) -> Tensor:
            return case.loss(self.model, *batch)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return adamw(self.model)

        def on_train_batch_start(self, batch: object, number: int) -> int | None:
            if number % own or control.go_on():
                return None
            self.trainer.should_stop = True
            return -1  # nothing more of this epoch

    trainer = lightning.Trainer(
        accelerator="cpu", devices=size, strategy=DDPStrategy(gradient_as_bucket_view=True),
        plugins=[TorchElasticEnvironment()], accumulate_grad_batches=own, max_epochs=1, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        use_distributed_sampler=False, deterministic=True,
    )  # fmt: skip
    control.hello(rank)
    trainer.fit(Module(), DataLoader(Data(), batch_size=None))


def with_torchft(case: Case, microbatches: int, control: Control, *, rank: int, size: int) -> None:
    """torchft, one worker a replica group; gradients in one piece (`benchmarks.recovery_sides` says why)."""
    from torchft import Optimizer  # type: ignore[import-not-found]

    model = case.model()
    optimizer = adamw(model)
    manager, servers = torchft_manager(rank, size)
    before_update = summed_by(model, lambda flat: manager.allreduce(flat).wait())
    control.hello(rank)
    loop(
        model, case, microbatches, control, rank=rank, size=size, optimizer=Optimizer(manager, optimizer),
        before_update=before_update,
    )  # fmt: skip
    dist.barrier()  # the lighthouse is with rank 0
    manager.shutdown(wait=False)
    servers.clear()


def torchft_manager(rank: int, size: int) -> tuple[Any, list[Any]]:
    """Return torchft's manager of this process, and the servers that have to live as long as it."""
    from torchft import Manager, ProcessGroupGloo
    from torchft.coordination import LighthouseServer  # type: ignore[import-not-found]

    own = _own_address()
    lighthouse = LighthouseServer(bind="[::]:0", min_replicas=size) if rank == 0 else None
    address = [f"http://{own}:{lighthouse.address().rpartition(':')[2]}" if lighthouse is not None else ""]
    dist.broadcast_object_list(address)
    os.environ["TORCHFT_LIGHTHOUSE"] = address[0]
    store = dist.TCPStore(own, 0, is_master=True, wait_for_workers=False)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=60)),
        load_state_dict=lambda state: None,
        state_dict=dict,
        min_replica_size=size,
        use_async_quorum=False,
        init_sync=False,  # all begin with the same weights, and the hosts of a lab have no names
        timeout=timedelta(seconds=60),
        rank=0,
        world_size=1,
        store_addr=own,
        store_port=store.port,
        replica_id=f"replica{rank}",
        hostname=own,
    )
    return manager, [lighthouse, store]


def _own_address() -> str:
    """Return the address at which the other processes reach this one."""
    device = os.environ.get("GLOO_SOCKET_IFNAME")
    found = psutil.net_if_addrs()[device] if device else []
    return next((one.address for one in found if one.family is socket.AF_INET), "localhost")


def with_deepspeed(case: Case, microbatches: int, control: Control, *, rank: int, size: int) -> None:
    """Loops whose gradients DeepSpeed sums in shared memory: its all-reduce for CPUs of one host, compiled here."""
    # Address and port are used for nothing but the names of the memory: those of a run that was killed would be found.
    own = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(os.getppid()), "LOCAL_SIZE": str(size)}
    os.environ.update(own, RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(size))
    from deepspeed import comm, init_distributed  # type: ignore[import-not-found]

    init_distributed("gloo", dist_init_required=False, verbose=False)
    if getattr(comm.comm.cdb, "shm_comm_op", None) is None:
        raise RuntimeError("deepspeed has not built its shared memory: it needs a C++ compiler and ninja")
    model = case.model()

    def mean(flat: Tensor) -> None:
        comm.inference_all_reduce(flat)
        flat.div_(size)

    control.hello(rank)
    loop(model, case, microbatches, control, rank=rank, size=size, before_update=summed_by(model, mean))
    for left in Path("/dev/shm").glob(f"deepspeed_*_localhost_{own['MASTER_PORT']}_{rank}"):
        left.unlink(missing_ok=True)


def summed_by(model: nn.Module, mean: Callable[[Tensor], object]) -> Callable[[], None]:
    """Return what makes of all gradients, in one piece, their mean over the processes."""

    def exchange() -> None:
        gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
        flat = torch.cat([gradient.flatten() for gradient in gradients])
        mean(flat)
        for gradient, part in zip(gradients, flat.split([each.numel() for each in gradients]), strict=True):
            gradient.copy_(part.view_as(gradient))

    return exchange


PEERS: dict[str, Peer] = {
    "zero": with_zero,
    "fsdp2": with_fsdp,
    "accelerate": with_accelerate,
    "lightning": with_lightning,
    "torchft": with_torchft,
    "deepspeed": with_deepspeed,
}
NEEDS = ("accelerate", "lightning", "torchft", "deepspeed")
"""Peers that are packages of their own."""


def missing(side: str) -> str:
    """Return why a side cannot be measured here; "" if it can."""
    return f"{side} is not installed" if side in NEEDS and find_spec(side) is None else ""
