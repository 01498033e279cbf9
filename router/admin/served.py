# SPDX-License-Identifier: Apache-2.0
"""What the admin API asks of whoever serves requests: this process, or several."""

from __future__ import annotations

from typing import Any, Protocol

import msgspec
from prometheus_client import generate_latest

from router.deciding import Deciding
from router.decisions.inputs import inputs_view
from router.decisions.record import DecisionRecord
from router.decisions.recorder import read_inputs
from router.decisions.reports import Taken


class Served(Protocol):
    """Answers for the whole service."""

    async def decisions(
        self, limit: int, model: str | None, worker: str | None, path: str | None
    ) -> list[Any]:
        """The newest records that fit, without their inputs."""
        ...

    async def decision(self, request_id: str) -> dict[str, Any]:
        """One record with its inputs, and the earlier attempts of its request.

        Raises:
            NotFoundError: it is not kept (any more).
        """
        ...

    async def queue(self) -> dict[str, Any]:
        """Who waits for a worker with room."""
        ...

    async def take_reports(self, body: bytes) -> Taken:
        """One batch of reports of an engine extension.

        Raises:
            MalformedReportsError: the body is none.
        """
        ...

    async def trials(self) -> dict[str, float] | None:
        """What trials of uncertain loads were made; None where none are."""
        ...

    async def troubles(self) -> list[str]:
        """Why decisions cannot be logged."""
        ...

    async def metrics(self) -> bytes:
        """Prometheus text."""
        ...


class ServedHere:
    """Of this process."""

    def __init__(self, deciding: Deciding) -> None:
        self._deciding = deciding

    async def decisions(
        self, limit: int, model: str | None, worker: str | None, path: str | None
    ) -> list[Any]:
        return [without_inputs(one) for one in self._deciding.log.select(limit, model, worker, path)]

    async def decision(self, request_id: str) -> dict[str, Any]:
        *earlier, last = self._deciding.log.get(request_id)
        return show_record(last) | {"earlier_attempts": [show_record(one) for one in earlier]}

    async def queue(self) -> dict[str, Any]:
        return self._deciding.room.view()

    async def take_reports(self, body: bytes) -> Taken:
        return self._deciding.reports.take(body)

    async def trials(self) -> dict[str, float] | None:
        explorer = self._deciding.explorer
        return explorer.view() if explorer is not None else None

    async def troubles(self) -> list[str]:
        writer = self._deciding.log_writer
        return [writer.degraded] if writer is not None and writer.degraded else []

    async def metrics(self) -> bytes:
        return generate_latest(self._deciding.metrics.registry)


def show_record(record: DecisionRecord) -> dict[str, Any]:
    """A record as plain values, its inputs with names."""
    inputs = read_inputs(record)
    shown: dict[str, Any] = msgspec.to_builtins(without_inputs(record))
    return shown | {"inputs": inputs_view(inputs) if inputs is not None else None}


def without_inputs(record: DecisionRecord) -> DecisionRecord:
    return msgspec.structs.replace(record, inputs=msgspec.UNSET)
