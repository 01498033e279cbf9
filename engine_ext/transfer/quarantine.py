# SPDX-License-Identifier: Apache-2.0
"""Parts of failed pulls that are not known to be over, and the blocks they may still write.

NIXL cannot cancel a transfer: releasing its handle leaves the reads under way, and they land later. So the handle is
kept and asked until it ends, and the blocks are kept until one of these is known:

    FINISHED           the transfer says it is done
    CONNECTION_ENDED   its connection failed, which ended all its requests, and `settle_s` have passed
    AGENT_DESTROYED    the agent that would have written is gone; asked for `linger_limit_s` after the pull failed,
                       or at once where the library's error does not say whether writes may still land
"""

from __future__ import annotations

from collections.abc import Iterator

from .agent import TransferState
from .config import TransferConfig
from .events import Proof, Released
from .generations import Generations
from .jobs import Part, PartState, Peer
from .ledger import Ledger


class Quarantine:
    """Costs O(parts held) per check."""

    def __init__(self, config: TransferConfig, generations: Generations, ledger: Ledger) -> None:
        self._config = config
        self._generations = generations
        self._ledger = ledger
        self._parts: list[Part] = []

    def __bool__(self) -> bool:
        """Whether anything is held."""
        return bool(self._parts)

    def hold(self, part: Part, now_s: float) -> None:
        """A posted part whose pull failed now."""
        part.failed_s = part.next_check_s = now_s
        self._ledger.quarantine(part.destination)
        self._parts.append(part)

    def note(self, part: Part, state: TransferState, now_s: float) -> Released | None:
        """What its agent said of a held part."""
        if state is TransferState.DONE:
            part.job.peer.seen(now_s)
            return self._release(part, Proof.FINISHED)
        if state is TransferState.GONE:
            part.settled_s = now_s + self._config.settle_s
        elif state is TransferState.UNKNOWN:
            part.unknown = True
        return None

    def check(self, now_s: float) -> tuple[list[Released], list[Peer]]:
        """Asks what is due, retires agents whose transfers do not end; what is over, and the peers that are gone."""
        released: list[Released] = []
        gone: list[Peer] = []
        for part in self._parts:
            if part.state is PartState.OVER:
                continue  # its agent was destroyed
            if part.settled_s is not None:
                if now_s >= part.settled_s:
                    released.append(self._release(part, Proof.CONNECTION_ENDED))
                continue
            generation = part.posted_on
            if not part.unknown and now_s >= part.next_check_s:
                part.next_check_s = now_s + self._config.linger_interval_s
                state = generation.agent.check(part.handle)
                over = self.note(part, state, now_s)
                if over is not None:
                    released.append(over)
                    continue
                if state is TransferState.GONE:
                    gone.append(part.job.peer)
                    continue
            if part.unknown or now_s >= part.failed_s + self._config.linger_limit_s:
                self._generations.retire(generation)
        self._parts = [part for part in self._parts if part.state is PartState.POSTED]
        return released, gone

    def due(self) -> Iterator[float]:
        """When each part is next to be looked at."""
        for part in self._parts:
            if part.settled_s is not None:
                yield part.settled_s
            elif not part.unknown:
                yield part.next_check_s
            elif not part.posted_on.retired:
                yield part.failed_s

    def destroyed(self, part: Part) -> Released:
        """Its agent is gone."""
        self._ledger.release(part.destination)
        return Released(part.job.job_id, tuple(part.destination), Proof.AGENT_DESTROYED)

    def _release(self, part: Part, proof: Proof) -> Released:
        self._generations.over(part)
        self._ledger.release(part.destination)
        return Released(part.job.job_id, tuple(part.destination), proof)
