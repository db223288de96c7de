"""The audits of a run, as its command line and its script ask for them."""

from __future__ import annotations

import torch

from unisono.cluster.worker.member import Member
from unisono.core.errors import UsageError
from unisono.core.settings import AuditThen, RunSettings
from unisono.core.spec import MOST_AUDITED
from unisono.engine.exchange.flat import with_flipped_bit
from unisono.engine.state.tracked import Tracked
from unisono.strategies.audit.audits import Audits
from unisono.system.faults import spoils

__all__ = ["make_audits", "spoil"]


def make_audits(
    settings: RunSettings, share: float, then: AuditThen, seed: int, member: Member | None
) -> Audits | None:
    """Return the audits of a run; None: nothing is audited.

    Args:
        share, then: what the script asks for; the command line wins.
        member: None: the script runs alone.

    Raises:
        UsageError: they make no sense.
    """
    share, then = settings.audit or share, settings.audit_then or then
    if not 0.0 <= share <= MOST_AUDITED:
        raise UsageError(
            "audit is the share of the micro-batches that a second worker computes as well, from 0 to "
            f"{MOST_AUDITED:g}, e.g. 0.01; got {share}"
        )
    if then not in ("go-back", "go-on"):
        raise UsageError(f'audit_then is "go-back" or "go-on"; got {then!r}')
    if not share:
        return None

    convict = member.convict if member is not None else None
    return Audits(share=share, then=then, seed=seed, convict=convict)


def spoil(tracked: Tracked) -> None:
    """Flip a bit of the state, where a test wants this worker's machine to be faulty. Between two steps."""
    with torch.no_grad():
        if (bit := spoils("parameter")) is not None:
            parameter = next(one for _, one in tracked.parameters())
            parameter.copy_(with_flipped_bit(parameter, bit))
        if (bit := spoils("optimizer")) is not None:
            states = (state for one in tracked.optimizers.values() for state in one.state.values())
            found = next((value for state in states for value in state.values() if value.numel() > 1), None)
            if found is None:
                raise UsageError("the optimizers have no state yet that a fault could spoil: choose a later step")
            found.copy_(with_flipped_bit(found, bit))
