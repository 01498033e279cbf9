# SPDX-License-Identifier: Apache-2.0
"""Pull agents over time: one is current, retired ones wait for their last open pull and are then destroyed.

An agent is retired when one of its transfers does not end. Its other pulls go on; new ones use its successor, to
which peers are introduced again with the offer they already gave, so no peer takes part in the change.
"""

from __future__ import annotations

from collections.abc import Iterator

from .agent import AgentFactory
from .config import TransferConfig
from .errors import AgentError
from .jobs import Generation, Peer, Transfer


class Generations:
    """Owns every pull agent. Operations are O(1), but for those that say otherwise."""

    def __init__(self, config: TransferConfig, factory: AgentFactory) -> None:
        """Makes the first agent.

        Raises:
            AgentError: it could not be made.
        """
        self._config = config
        self._factory = factory
        self._made = 0
        self._next_make_s = 0.0
        self._closed = False
        self.retired: list[Generation] = []
        """They wait to be destroyed."""
        self.destroyed = 0
        self.current: Generation | None = self._make()

    def ready(self, now_s: float) -> Generation | None:
        """The agent to begin transfers with, made now if the last one was retired; None: not yet."""
        if self.current is None and not self._closed and now_s >= self._next_make_s:
            try:
                self.current = self._make()
            except AgentError:
                self._next_make_s = now_s + self._config.retry_s
        return self.current

    def introduce(self, peer: Peer, generation: Generation) -> None:
        """Makes the peer known to this agent, once.

        Raises:
            AgentError: its offer is unusable.
        """
        if peer.boot_id not in generation.peers:
            generation.agent.add_peer(peer.offer)
            generation.peers[peer.boot_id] = 0

    def posted(self, transfer: Transfer) -> None:
        """It is under way on its agent."""
        transfer.generation.transfers[transfer] = None
        transfer.generation.peers[transfer.peer.boot_id] += 1
        transfer.peer.posted += 1

    def over(self, transfer: Transfer) -> None:
        """It is over: its handle is freed, and its peer too if that was waiting for it."""
        generation, peer = transfer.generation, transfer.peer
        transfer.shares = []  # they refer to it
        peer.posted -= 1
        generation.agent.release(transfer.handle)
        del generation.transfers[transfer]
        generation.peers[peer.boot_id] -= 1
        self._leave(generation, peer.boot_id)

    def drop(self, peer: Peer) -> None:
        """Each agent removes this peer as soon as no transfer of its is left. O(agents)."""
        for generation in self._all():
            if peer.boot_id in generation.peers:
                generation.leaving.add(peer.boot_id)
                self._leave(generation, peer.boot_id)

    def retire(self, generation: Generation) -> None:
        """Begins nothing more on this agent; it is destroyed once no open pull needs it."""
        if generation.retired:
            return
        generation.retired = True
        self.retired.append(generation)
        if generation is self.current:
            self.current = None

    def end_retired(self, now_s: float) -> list[Transfer]:
        """Destroys what can be destroyed; the transfers that are over because their agent is. O(transfers under way)."""
        ended: list[Transfer] = []
        for generation in list(self.retired):
            if now_s < generation.next_close_s or generation.serves_open_jobs:
                continue
            try:
                generation.agent.close()
            except AgentError:
                generation.next_close_s = now_s + self._config.retry_s
                continue
            self.retired.remove(generation)
            self.destroyed += 1
            for transfer in generation.transfers:
                transfer.peer.posted -= 1
                ended.append(transfer)
            generation.transfers.clear()
        return ended

    def close(self) -> None:
        """Makes no more agents and retires all; `end_retired` then destroys them."""
        self._closed = True
        if self.current is not None:
            self.retire(self.current)
        for generation in self.retired:
            generation.next_close_s = 0.0

    @property
    def alive(self) -> int:
        return len(self.retired) + (self.current is not None)

    @property
    def transfers(self) -> int:
        return sum(len(generation.transfers) for generation in self._all())

    def due(self, *, waiting: bool) -> Iterator[float]:
        """When something here is next of use; `waiting`: pulls wait for an agent."""
        if waiting and self.current is None and not self._closed:
            yield self._next_make_s
        for generation in self.retired:
            if not generation.serves_open_jobs:
                yield generation.next_close_s

    def _all(self) -> list[Generation]:
        return [*self.retired, *([self.current] if self.current is not None else [])]

    def _make(self) -> Generation:
        self._made += 1
        return Generation(self._made, self._factory(self._made))

    def _leave(self, generation: Generation, boot_id: str) -> None:
        if boot_id in generation.leaving and not generation.peers[boot_id]:
            generation.leaving.discard(boot_id)
            del generation.peers[boot_id]
            generation.agent.remove_peer(boot_id)
