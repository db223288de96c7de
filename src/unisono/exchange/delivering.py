"""Delivery of tensors from some members to others, where an exchange has no better way than a broadcast."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from unisono.exchange import Exchange, Parcel

__all__ = ["deliver_by_broadcast"]


def deliver_by_broadcast(exchange: Exchange, parcels: Sequence[Parcel]) -> None:
    """Do what `Exchange.deliver` promises with one broadcast for each parcel, which also goes where nobody needs it."""
    for parcel in parcels:
        if parcel.targets and parcel.tensor.numel():
            takes_part = exchange.rank == parcel.source or exchange.rank in parcel.targets
            tensor = parcel.tensor
            exchange.broadcast(tensor if takes_part else torch.empty_like(tensor, device="cpu"), parcel.source)
