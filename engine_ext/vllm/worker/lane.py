# SPDX-License-Identifier: Apache-2.0
"""Lanes: transfers of one direction, one after the other, with the time each took. Imports no torch.

A copy is handed over as a call that makes it or enqueues it. What a lane promises is what vLLM's worker promises
(`v1/kv_offload/cpu/gpu_worker.py`): a transfer starts behind the transfers before it and behind the model's work that
was enqueued before it, which may still write the pages that it reads, or zero those that it fills.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

Copy = Callable[[], object]


@dataclass(frozen=True, slots=True)
class Finished:
    """A transfer that is over."""

    job_id: int
    size_bytes: int
    seconds: float
    """From the moment its turn came."""


class Lane(Protocol):
    """For one thread."""

    def run(self, job_id: int, size_bytes: int, copy: Copy) -> None:
        """Starts a transfer and does not wait for it. What `copy` raises is the caller's."""

    def finished(self) -> list[Finished]:
        """Those that have ended since the last call, in order. Does not wait."""

    def wait(self, job_ids: Collection[int]) -> None:
        """Returns when none of these runs any more; `finished` still tells of them. Unknown ids are none of ours."""

    def close(self) -> None:
        """Waits for everything and forgets it."""


class HostLane:
    """Memory moves: over when `run` returns."""

    def __init__(self, clock_s: Callable[[], float]) -> None:
        self._clock_s = clock_s
        self._finished: list[Finished] = []

    def run(self, job_id: int, size_bytes: int, copy: Copy) -> None:
        started_s = self._clock_s()
        copy()
        self._finished.append(Finished(job_id, size_bytes, self._clock_s() - started_s))

    def finished(self) -> list[Finished]:
        finished, self._finished = self._finished, []
        return finished

    def wait(self, job_ids: Collection[int]) -> None:
        """Nothing is under way between calls."""

    def close(self) -> None:
        self._finished.clear()


class Cuda(Protocol):
    """What is used of the module `torch.cuda`."""

    def Stream(self, device: Any) -> Any: ...  # noqa: N802 - torch's name
    def Event(self, enable_timing: bool) -> Any: ...  # noqa: N802 - torch's name
    def current_stream(self, device: Any) -> Any: ...
    def stream(self, stream: Any) -> AbstractContextManager[Any]: ...


@dataclass(frozen=True, slots=True)
class _Running:
    job_id: int
    size_bytes: int
    start: Any
    end: Any


class CudaLane:
    """One stream, which is what keeps its transfers in order. Lanes do not wait for one another."""

    def __init__(self, cuda: Cuda, device: Any) -> None:
        """`device`: where the KV caches are."""
        self._cuda = cuda
        self._device = device
        self._stream = cuda.Stream(device)
        self._running: deque[_Running] = deque()

    def run(self, job_id: int, size_bytes: int, copy: Copy) -> None:
        start, end = self._cuda.Event(enable_timing=True), self._cuda.Event(enable_timing=True)
        self._stream.wait_stream(self._cuda.current_stream(self._device))
        with self._cuda.stream(self._stream):
            start.record(self._stream)
            copy()
            end.record(self._stream)
        self._running.append(_Running(job_id, size_bytes, start, end))

    def finished(self) -> list[Finished]:
        over = []
        while self._running and self._running[0].end.query():
            one = self._running.popleft()
            over.append(Finished(one.job_id, one.size_bytes, one.start.elapsed_time(one.end) * 1e-3))
        return over

    def wait(self, job_ids: Collection[int]) -> None:
        for one in self._running:
            if one.job_id in job_ids:
                one.end.synchronize()

    def close(self) -> None:
        self._running.clear()
        self._stream.synchronize()
