"""Admission of workers that say hello: refuse them, or repeat the messages that they have missed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from unisono.core.errors import ProtocolError
from unisono.core.fingerprints import RESULTS, other_results
from unisono.core.messages import PROTOCOL, Ended, Hello
from unisono.core.words import listed
from unisono.membership.draft import Draft
from unisono.membership.restarts import note_failure
from unisono.membership.roster import State, Worker, WorkerState
from unisono.record.problems.kinds import Trouble

__all__ = ["MAX_UNREACHED", "check_protocol", "differences", "greet", "refusal", "send_away"]

_S = WorkerState

MAX_UNREACHED: Final = 2
"""A newcomer is sent away after so many generations in which the members could not exchange with it. The members stand
still meanwhile."""


def check_protocol(name: str, protocol: int) -> None:
    """Raise ProtocolError for a process that runs another version."""
    if protocol != PROTOCOL:
        raise ProtocolError(
            f"{name} speaks protocol {protocol} and the head {PROTOCOL}; install the same version of unisono on all "
            "machines"
        )


def greet(draft: Draft, worker: Worker, message: Hello) -> None:
    """Accept a worker, repeat the notice that it has missed, or refuse it."""
    worker_id = worker.worker_id
    _learn_generation(draft, worker, message.generation)
    if worker.info is not None:
        _greet_again(draft, worker, message)
        return
    if message.info.worker_id != worker_id:
        raise ProtocolError(f"worker {worker_id} calls itself {message.info.worker_id}")
    worker = draft.put_worker(worker_id, info=message.info)
    if text := refusal(draft.state, message):
        draft.alarm(Trouble(kind="failed-join", worker_id=worker_id, error=f"it {text}", then="the others continue"))
        _refuse(draft, worker, f"{worker.name} on {message.info.host} {text}")
        return
    known = draft.state.fingerprint or dict(message.fingerprint)
    draft.put(fingerprint=known, script=draft.state.script or message.script)
    if text := objection(draft.state, message):
        text = f"{worker.name} on {message.info.host} {text}"
        draft.put_worker(worker_id, warning=text)
        draft.reasons.append(f"{text}; {outlook(draft.state, message)}")


def _greet_again(draft: Draft, worker: Worker, message: Hello) -> None:
    """Greet a worker that connects again after its connection broke."""
    assert worker.info is not None
    worker_id = worker.worker_id
    if worker.info.pid != message.info.pid:
        raise ProtocolError(
            f"{worker.name} is connected already, but the process with pid {message.info.pid} uses its name"
        )
    draft.put_worker(worker_id, closed_at=None)
    notice = draft.state.notice
    # A worker that was left out meanwhile also gets the notice that the others have gone on.
    is_concerned = worker_id in draft.state.member_ids or worker_id in draft.state.before
    is_concerned = is_concerned or message.generation > 0  # perhaps in a generation that this head does not know
    if notice is not None and (is_concerned or worker.state in (_S.ADMITTED, _S.HOLDING, _S.ASIDE)):
        draft.send(worker_id, notice)


def _learn_generation(draft: Draft, worker: Worker, generation: int) -> None:
    """Learn of a generation that a worker holds and an earlier head has announced, and that this head does not know.

    Its number is not used again: members would ignore the notice. The holders of the state go on in the next one.
    """
    if generation <= max(draft.state.generation, draft.state.unknown):
        return
    draft.put(unknown=generation)
    if draft.state.members:
        draft.broken.append(f"{worker.name} holds generation {generation}, which this head does not know")


def _refuse(draft: Draft, worker: Worker, why: str) -> None:
    """Refuse a worker that would compute other bits. It is not replaced: another process there would be refused too."""
    draft.retire(worker.worker_id, _S.LEFT, "failed", why)
    draft.send(worker.worker_id, Ended(ok=False, reason=why, worker_id=worker.worker_id, exit_code=1))
    draft.evict(worker, why)
    note_failure(draft, worker, why)
    draft.reasons.append(why)


def send_away(draft: Draft, worker: Worker) -> None:
    """Dismiss a newcomer with which the others cannot exchange."""
    where = f" at {worker.info.address}" if worker.info else ""
    why = (
        f"{worker.name}{where} is sent away: in {MAX_UNREACHED} attempts the others could not exchange with it. "
        "Workers connect to each other directly, at ports that the system chooses: does a firewall between the "
        "machines prevent that?"
    )
    error = f"in {MAX_UNREACHED} attempts the others could not exchange with it{where}"
    advice = "Does a firewall between the machines keep the workers from connecting to each other?"
    draft.alarm(Trouble(kind="failed-join", worker_id=worker.worker_id, error=error, advice=advice))
    draft.dismiss(worker, why)
    note_failure(draft, worker, why)
    draft.reasons.append(why)


def differences(first: Mapping[str, str], other: Mapping[str, str]) -> list[str]:
    """Return the entries in which two fingerprints differ, as sentences."""
    return [
        f"{key} is {other.get(key, 'unknown')!r} and not {first.get(key, 'unknown')!r}"
        for key in sorted({*first, *other})
        if first.get(key) != other.get(key) and key != RESULTS
    ]


def refusal(state: State, hello: Hello) -> str:
    """Return why this worker may not take part and what to do about it; "" if it may."""
    if not state.settings.allow_different_script and (text := _other_script(state, hello)):
        return (
            f"{text}, so it would compute different gradients, and is rejected; was the script edited after the run "
            "started? Restore the text that the run was started with, or start the run with --set "
            "allow-different-script=yes"
        )
    known = state.fingerprint or hello.fingerprint
    if found := other_results(known, hello.fingerprint):
        others = "; ".join(differences(known, hello.fingerprint)) or "nothing else that is known about it differs"
        return (
            f"gets different bits in {listed(found)} ({others}), so it would compute different gradients, and is "
            "rejected. Install the same torch on all machines; where the processors differ, start the run with --set "
            "arithmetic=avx2, or =compatible where they are of several makers"
        )
    is_untried = state.held and state.settings.parts > 1 and not state.settings.arithmetic
    if is_untried and (found := differences(known, hello.fingerprint)):
        return (
            f"may compute differently: {', '.join(found)}; where a model is in parts a worker cannot be tried before "
            "its values count, so it is rejected. Add a machine that is like the others, or start the run with --set "
            "arithmetic=avx2, or =compatible where the processors are of several makers"
        )
    if state.settings.strict and (text := objection(state, hello)):
        return f"{text}; refused (--strict)"
    return ""


def objection(state: State, hello: Hello) -> str:
    """Return how this worker differs, as a sentence without its subject; "" if it does not."""
    texts = []
    if found := differences(state.fingerprint or hello.fingerprint, hello.fingerprint):
        texts.append(f"may compute differently: {', '.join(found)}")
    if text := _other_script(state, hello):
        texts.append(text)
    return " and ".join(texts)


def outlook(state: State, hello: Hello) -> str:
    """Return what is to be expected of a worker to which there is an objection, as a sentence."""
    known = [
        one for one in (state.fingerprint or {}, hello.fingerprint) if one.get("device") == "cpu" and RESULTS in one
    ]
    if len(known) == 2 and not _other_script(state, hello):
        return (
            "it gets the same bits in a probe of some operations, and is sent away if it gets others for its first "
            "micro-batches, which do not count"
        )
    return "the same bits at any number of workers no longer hold while it takes part"


def _other_script(state: State, hello: Hello) -> str:
    # "" is no text at all: of a script that is not there, which says so itself, or of none that is a file.
    if hello.script in ("", state.script) or not state.script:
        return ""
    return f"has a different text of the script (checksum {hello.script}) than the run (checksum {state.script})"
