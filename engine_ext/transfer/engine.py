# SPDX-License-Identifier: Apache-2.0
"""The pull engine for an owner that polls: the state machine with a clock.

    engine = PullEngine(config, region, agents)
    engine.connect(address, offer)                    # from a handshake
    job = engine.submit(PullRequest(address, offer.boot_id, source, destination, engine.now_s() + 0.5))
    while True:
        for event in engine.poll(): ...
        pause_s = engine.next_poll_s()                # None: sleep until there is something to submit

A poll never waits for a peer. Over shared memory UCX copies inside the call that posts a part, so a poll may
take as long as one part takes to copy; an owner that cannot afford this uses `PullThread`.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable, Iterator
from typing import cast

from .agent import AgentFactory, PeerOffer
from .config import TransferConfig
from .events import Counts, Event, JobId, PullRequest
from .machine import Machine
from .region import Region


class PullEngine:
    """Every method is for one thread."""

    def __init__(
        self,
        config: TransferConfig,
        region: Region,
        agents: AgentFactory,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Registers the region with a first agent.

        Raises:
            TransferConfigError: a setting is not usable.
            AgentError: no agent, or it cannot register the region; nothing is left behind.
        """
        self.now_s = clock
        self._machine = Machine(config.check(), region, agents)
        self._ids = cast("Iterator[JobId]", itertools.count(1))

    def connect(self, address: str, offer: PeerOffer) -> None:
        """As Machine.connect."""
        self._machine.connect(address, offer, self.now_s())

    def forget(self, address: str) -> None:
        """As Machine.forget."""
        self._machine.forget(address, self.now_s())

    def submit(self, request: PullRequest, job_id: JobId | None = None) -> JobId:
        """Queues a pull and names it. Every outcome, a refusal too, comes from a later `poll`."""
        job_id = next(self._ids) if job_id is None else job_id
        self._machine.submit(job_id, request, self.now_s())
        return job_id

    def abort(self, job_id: JobId) -> None:
        """As Machine.abort."""
        self._machine.abort(job_id, self.now_s())

    def poll(self) -> list[Event]:
        """Moves everything on and returns what ended."""
        self._machine.poll(self.now_s())
        return self._machine.take(self.now_s())

    def next_poll_s(self) -> float | None:
        """As Machine.next_poll_s."""
        return self._machine.next_poll_s(self.now_s())

    def busy(self, blocks: Iterable[int]) -> bool:
        """As Machine.busy."""
        return self._machine.busy(blocks)

    def counts(self) -> Counts:
        return self._machine.counts()

    def close(self) -> tuple[bool, list[Event]]:
        """As Machine.close, with the last events."""
        closed = self._machine.close(self.now_s())
        return closed, self._machine.take(self.now_s())
