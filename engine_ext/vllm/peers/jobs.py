# SPDX-License-Identifier: Apache-2.0
"""A load job of the engine, cut into one part per source, and joined again. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Finished:
    """The end of a load job. `arrived` keys are good; the chunks of all others are free, or in quarantine."""

    job_id: int
    complete: bool
    arrived: tuple[bytes, ...]
    size_bytes: int
    seconds: float


@dataclass(slots=True)
class Job:
    """An open load job: it ends when its last part has ended."""

    job_id: int
    keys: int
    started_s: float
    parts: int = 0
    arrived: list[bytes] = field(default_factory=list)

    def ended(self, arrived: Sequence[bytes], block_bytes: int, now_s: float) -> Finished | None:
        """One part ended with these keys in place."""
        self.parts -= 1
        self.arrived += arrived
        return None if self.parts else self.finish(block_bytes, now_s)

    def finish(self, block_bytes: int, now_s: float) -> Finished:
        return Finished(
            self.job_id,
            len(self.arrived) == self.keys,
            tuple(self.arrived),
            len(self.arrived) * block_bytes,
            now_s - self.started_s,
        )


@dataclass(slots=True)
class Part:
    """The chunks of one job that one source delivers."""

    job: Job
    request_id: str
    pull: int
    """Its place in the request's plan."""
    chunks: dict[bytes, int]
    source: str
    kind: str
    started_s: float
    deadline_s: float
    foreign: object = None
    over: bool = False
    """The job has heard of its end; only its chunks may still be in use."""
