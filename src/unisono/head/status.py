"""Answers of the head over HTTP: ``/health`` and ``/proof`` without a token, ``/status`` with it."""

from __future__ import annotations

import hmac
import http
import json
from collections.abc import Callable, Mapping
from typing import Any

from websockets.asyncio.server import ServerConnection
from websockets.datastructures import Headers
from websockets.http11 import Request, Response

from unisono.decisions.membership.roster import State, Worker, WorkerState
from unisono.secret import PROOF, proof_of

__all__ = ["respond", "workers_status"]


def respond(
    connection: ServerConnection, request: Request, token: str, status: Callable[[], dict[str, Any]]
) -> Response | None:
    """Answer a request; None: the request has the token and is for a WebSocket."""
    path, _, question = request.path.partition("?")
    if path == "/health":
        return connection.respond(http.HTTPStatus.OK, "ok\n")
    if path == PROOF:  # who cannot know this head by its certificate asks before the token is sent
        return connection.respond(http.HTTPStatus.OK, proof_of(token, question))
    given = request.headers.get_all("Authorization")
    bearer = given[0].removeprefix("Bearer ").encode(errors="surrogateescape") if len(given) == 1 else b""
    if not hmac.compare_digest(bearer, token.encode()):
        return connection.respond(http.HTTPStatus.UNAUTHORIZED, "the run's token is needed\n")
    if path == "/status":
        body = json.dumps(status()).encode()
        headers = Headers([("Content-Type", "application/json"), ("Content-Length", str(len(body)))])
        return Response(200, "OK", headers, body)
    if path == "/":
        return None
    return connection.respond(http.HTTPStatus.NOT_FOUND, "there is /health, /status and the WebSocket at /\n")


def workers_status(state: State) -> list[dict[str, Any]]:
    """Return the workers that have connected, without those that were lost or have left."""
    ranks = {worker_id: rank for rank, worker_id in enumerate(state.members)}
    return [
        _worker_status(ranks, worker)
        for worker in state.workers.values()
        if worker.info is not None and worker.state not in (WorkerState.LEFT, WorkerState.LOST)
    ]


def _worker_status(ranks: Mapping[str, int], worker: Worker) -> dict[str, Any]:
    assert worker.info is not None
    is_member = worker.state in (WorkerState.ADMITTED, WorkerState.HOLDING)
    return {
        "worker_id": worker.worker_id,
        "rank": ranks.get(worker.worker_id) if is_member else None,
        "state": worker.state.value,
        "pid": worker.info.pid,
        "host": worker.info.host,
        "device": worker.info.device,
        "step": worker.beat.step if worker.beat else -1,
        "microbatch": worker.beat.microbatch if worker.beat else -1,
    }
