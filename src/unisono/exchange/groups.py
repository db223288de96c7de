"""The group of ``torch.distributed`` that a script gets: it can be taken back.

A member that waits in a collective of gloo for another one wakes up when the connection between them is closed. A group
closes its connections when it is deleted, and the script may hold it for ever. So the script gets a group that passes
calls on to another one, which only its maker holds.
"""

from __future__ import annotations

from typing import Any, Final

import torch
import torch.distributed as dist

__all__ = ["ScriptGroup"]

CALLS: Final = (
    *("allreduce", "allreduce_coalesced", "reduce", "broadcast", "barrier", "monitored_barrier"),
    *("allgather", "_allgather_base", "allgather_coalesced", "allgather_into_tensor_coalesced", "gather", "scatter"),
    *("reduce_scatter", "_reduce_scatter_base", "reduce_scatter_tensor_coalesced", "alltoall", "alltoall_base"),
    *("send", "recv", "recv_anysource", "_get_backend", "_start_coalescing", "_end_coalescing"),
    *("all_gather_single", "all_to_all_single", "reduce_scatter_single"),
)
"""The methods that are passed on, as far as this version of torch has them."""


class ScriptGroup(dist.ProcessGroup):
    """A group of ``torch.distributed``, until `end`.

    Args:
        kind: "gloo" or "nccl".
        backend: what does the work.
    """

    def __init__(self, store: dist.Store, rank: int, size: int, device: torch.device, kind: str, backend: Any) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]
        types = dist.ProcessGroup.BackendType
        chosen = types.NCCL if kind == "nccl" else types.GLOO
        self._inner: Any = dist.ProcessGroup(store, rank, size)
        self._inner._set_default_backend(chosen)
        self._inner._register_backend(device, chosen, backend)

    def end(self) -> None:
        """Raise RuntimeError in all later calls, and close the connections when the last collective has ended."""
        self._inner = None

    def _pass_on(self, name: str, *arguments: Any, **options: Any) -> Any:
        if self._inner is None:
            raise RuntimeError(
                "this group is over, because the members of the run have changed; call run.process_group() again"
            )
        return getattr(self._inner, name)(*arguments, **options)


def _passed_on(name: str) -> Any:
    def call(self: ScriptGroup, *arguments: Any, **options: Any) -> Any:
        return self._pass_on(name, *arguments, **options)

    call.__name__ = name
    return call


for _name in CALLS:
    if hasattr(dist.ProcessGroup, _name):
        setattr(ScriptGroup, _name, _passed_on(_name))
