# SPDX-License-Identifier: Apache-2.0
"""Asks one worker how it is: ``/health``, ``/metrics``, ``/v1/models``, once ``/kv_event_sources``.

The requests of one worker run one after another and the next poll starts only when the last one has
ended, so polls never pile up on a worker that hangs. Every answer is read up to a limit and under a
time limit. A poll's result is a value; :class:`~router.fleet.fleet.Fleet` says what it means.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import aiohttp
import msgspec

from router.fleet.bounded_body import read_bounded
from router.fleet.metrics_text import MAX_METRICS_BYTES, WorkerMetrics, parse_worker_metrics
from router.fleet.worker import ModelInfo, WorkerSpec

MAX_JSON_BYTES = 2**20
"""Limit for ``/v1/models`` and ``/kv_event_sources``."""


class Reach(enum.Enum):
    """What ``/health`` said."""

    OK = "ok"
    REFUSED = "refused"  # no connection: there is no server at this address
    SILENT = "silent"  # no answer in time, or the connection broke: one such poll proves little
    SICK = "sick"  # answered, but not with 2xx


@dataclass(frozen=True, slots=True)
class PollResult:
    """One poll; None where a question was not answered."""

    reach: Reach
    error: str | None = None
    metrics: WorkerMetrics | None = None
    models: Mapping[str, ModelInfo] | None = None
    event_ranks: int | None = None
    """Ranks with an event publisher; 0 when the worker has the call but publishes nothing."""


class WorkerPoller:
    """Polls one worker over a shared session. One ``poll`` at a time."""

    def __init__(self, spec: WorkerSpec, session: aiohttp.ClientSession, timeout_s: float) -> None:
        self._spec = spec
        self._session = session
        self._timeout = aiohttp.ClientTimeout(total=timeout_s)

    async def poll(self, *, first: bool) -> PollResult:
        """Ask; ``first`` also asks for the event publishers. Raises nothing but cancellation."""
        reach, error = await self._health()
        if reach is not Reach.OK:
            return PollResult(reach, error)
        page = await self._get("/metrics", MAX_METRICS_BYTES, cut=True)
        models = await self._get("/v1/models", MAX_JSON_BYTES)
        sources = await self._get("/kv_event_sources", MAX_JSON_BYTES) if first else None
        missing = [name for name, body in (("/metrics", page), ("/v1/models", models)) if body is None]
        return PollResult(
            reach,
            error=f"no answer from {' and '.join(missing)}" if missing else None,
            metrics=None if page is None else parse_worker_metrics(page),
            models=None if models is None else parse_models(models),
            event_ranks=None if sources is None else count_event_ranks(sources),
        )

    async def _health(self) -> tuple[Reach, str | None]:
        try:
            async with self._session.get(self._spec.url + "/health", timeout=self._timeout) as answer:
                if answer.ok:
                    return Reach.OK, None
                return Reach.SICK, f"/health answers {answer.status}"
        except aiohttp.ClientConnectorError as error:
            return Reach.REFUSED, f"/health: {error.os_error.strerror or error}"
        except TimeoutError:
            return Reach.SILENT, f"/health: no answer in {self._timeout.total} s"
        except (aiohttp.ClientError, OSError) as error:
            return Reach.SILENT, f"/health: {type(error).__name__}: {error}"

    async def _get(self, path: str, limit_bytes: int, *, cut: bool = False) -> bytes | None:
        """Body of a 200 answer; None for any other, and for one over the limit unless ``cut``."""
        try:
            async with self._session.get(self._spec.url + path, timeout=self._timeout) as answer:
                if answer.status != 200:
                    return None
                return await read_bounded(answer, limit_bytes, cut=cut)
        except (TimeoutError, aiohttp.ClientError, OSError):
            return None


def parse_models(body: bytes) -> dict[str, ModelInfo] | None:
    """Rows of ``/v1/models`` (``vllm/entrypoints/openai/models``) by name; None if it is no such list.

    Served names of one base model share its ``root``; the first of them is its name. A row with a
    ``parent`` is a LoRA adapter of that base.
    """
    document = _json(body)
    rows = document.get("data") if isinstance(document, dict) else None
    if not isinstance(rows, list):
        return None
    first_of_root: dict[str, str] = {}
    bases: dict[str, str] = {}
    models: dict[str, ModelInfo] = {}
    named = [row for row in rows if isinstance(row, dict) and isinstance(row.get("id"), str)]
    for row in named:
        name, root = row["id"], _text(row.get("root"))
        if _text(row.get("parent")) is None:
            bases[name] = first_of_root.setdefault(root or name, name)
            models[name] = ModelInfo(name, bases[name], None, root, _length(row.get("max_model_len")))
    for row in named:
        name, parent = row["id"], _text(row.get("parent"))
        if parent is not None:
            base = bases.get(parent) or first_of_root.get(parent) or parent
            length = _length(row.get("max_model_len"))
            if length is None and base in models:
                length = models[base].max_model_len
            models[name] = ModelInfo(name, base, name, _text(row.get("root")), length)
    return models


def count_event_ranks(body: bytes) -> int | None:
    """Ranks in ``/kv_event_sources``: a map from rank to the configuration of its publisher."""
    document = _json(body)
    if not isinstance(document, dict):
        return None
    return sum(1 for rank, source in document.items() if rank.isdigit() and isinstance(source, dict))


def _json(body: bytes) -> Any:
    try:
        return msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


def _text(value: object) -> str | None:
    return value if isinstance(value, str) else None


def _length(value: object) -> int | None:
    return value if isinstance(value, int) and value > 0 else None
