# SPDX-License-Identifier: Apache-2.0
"""What a replay sends to its fleet: the same for every policy, begun anew for each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from router.replay.arrivals import Arrivals, TraceArrivals
from router.replay.traces import TraceRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """A source of requests, and which of them count."""

    title: str
    begin: Callable[[], Arrivals]
    measured: Sequence[int]
    """Indices of the requests that the figures are of; those before warm the caches up."""
    too_long: int = 0
    """Requests left out because no worker has room for them, or as longer than asked for."""


def open_workload(
    title: str, requests: Sequence[TraceRequest], measured_from_s: float = 0.0, too_long: int = 0
) -> Workload:
    """Requests at the times they carry; those from ``measured_from_s`` on count."""
    return Workload(
        title=title,
        begin=lambda: TraceArrivals(requests),
        measured=[one.index for one in requests if one.arrival_s >= measured_from_s],
        too_long=too_long,
    )
