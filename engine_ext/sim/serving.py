# SPDX-License-Identifier: Apache-2.0
"""An engine as the source of other engines' pulls: which blocks of its RAM it has, or will have soon.

Two kinds of question (vLLM 0.32, ``tiering/p2p/session/server.py``). A lookup is answered when every block of it is
settled: one that is being written counts as held once it is, and as missed after ``peer_pending_s``. A decoder's
fetch under a ``kv_request_id`` waits for the prefill of that name, in whatever order the two arrive, and hears of
blocks as they are stored, so that pulls begin while the prefill goes on. What a prefill has stored for its decoder
stays in RAM until it is fetched, at most ``peer_parked_s``.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

from engine_ext.sim.agenda import Agenda, Plan
from engine_ext.sim.network import PeerNetwork
from engine_ext.sim.output import PeerAnswer, PeerReply
from engine_ext.sim.profile import SimProfile
from engine_ext.sim.request import Live
from engine_ext.sim.tiers import RamTier


@dataclass(slots=True, eq=False)
class _Question:
    ticket: Hashable
    keys: Sequence[bytes]
    prefill: str | None
    """The name of the prefill it waits for; None for a lookup."""
    unsettled: set[bytes]
    held: set[bytes] = field(default_factory=set)
    turns: int = 0
    """Leading blocks whose pull has its turn on our link."""
    deadline: Plan | None = None


@dataclass(slots=True)
class _Prefill:
    """One request with ``remote_decoder``."""

    over: bool = False
    parked: list[bytes] = field(default_factory=list)


class PeerServer:
    """Open questions and parked blocks of one engine; ``replies`` is drained by the core."""

    def __init__(
        self, profile: SimProfile, agenda: Agenda, ram: RamTier, network: PeerNetwork, block_bytes: int
    ) -> None:
        self._profile = profile
        self._agenda = agenda
        self._ram = ram
        self._network = network
        self._block_bytes = block_bytes
        self.replies: list[PeerReply] = []
        self._open: dict[_Question, None] = {}
        self._prefills: dict[str, _Prefill] = {}

    def ask(self, ticket: Hashable, keys: Sequence[bytes], prefill: str | None, now_s: float) -> PeerAnswer:
        """The first answer; where it is not the last one, others follow in ``replies`` under ``ticket``."""
        question = _Question(ticket, keys, prefill, set(keys))
        self._settle(question)
        if question.unsettled:
            self._open[question] = None
            limit_s = self._profile.peer_pending_s if prefill is None else self._profile.peer_timeout_s
            question.deadline = self._agenda.at(now_s + limit_s, lambda at_s: self._give_up(question, at_s))
            if prefill is None:
                return PeerAnswer([None] * len(keys), 0.0)
        return self._answer(question, now_s)

    def prefill_begins(self, live: Live) -> None:
        """A request with ``remote_decoder`` has arrived."""
        if live.params.decoder_id is not None:
            self._prefills[live.params.decoder_id] = _Prefill()

    def prefill_ends(self, live: Live, now_s: float) -> None:
        """It has ended, or its client has gone: what it has not stored by now will not come."""
        name = live.params.decoder_id
        prefill = self._prefills.get(name) if name is not None else None
        if name is None or prefill is None or prefill.over:
            return
        prefill.over = True
        self._agenda.at(now_s + self._profile.peer_parked_s, lambda _: self._forget(name, prefill))
        self.look_again(now_s)

    def stored(self, live: Live, keys: Sequence[bytes], now_s: float) -> None:
        """Blocks of a request have been written to RAM."""
        prefill = self._prefills.get(live.params.decoder_id or "")
        if prefill is not None:
            self._ram.pin(keys)
            prefill.parked.extend(keys)
        self.look_again(now_s)

    def look_again(self, now_s: float) -> None:
        """Blocks have come or gone: answer, on the agenda, what can be answered now."""
        if self._open:
            self._agenda.at(now_s, self._answer_open)

    def _answer_open(self, now_s: float) -> None:
        for question in list(self._open):
            if self._settle(question) and not (question.unsettled and question.prefill is None):
                self._reply(question, now_s)

    def clear(self) -> None:
        """RAM was cleared, pins and all."""
        for prefill in self._prefills.values():
            prefill.parked.clear()

    def _settle(self, question: _Question) -> bool:
        """Look at the blocks of which nothing was known; whether anything is now."""
        prefill = self._prefills.get(question.prefill) if question.prefill is not None else None
        may_come = question.prefill is not None and not (prefill is not None and prefill.over)
        before = len(question.unsettled)
        held = {key for key in question.unsettled if self._ram.ready(key)}
        missed = () if may_come else {key for key in question.unsettled if not self._ram.known(key)}
        question.held |= held
        question.unsettled -= held.union(missed)
        return len(question.unsettled) < before

    def _give_up(self, question: _Question, now_s: float) -> None:
        question.unsettled.clear()
        self._reply(question, now_s)

    def _reply(self, question: _Question, now_s: float) -> None:
        self.replies.append(PeerReply(question.ticket, self._answer(question, now_s)))
        if not question.unsettled:
            self._open.pop(question, None)
            if question.deadline is not None:
                question.deadline.cancel()

    def _answer(self, question: _Question, now_s: float) -> PeerAnswer:
        """What is known of each block; those that can be pulled now get their turn on our link."""
        keys = question.keys
        if question.prefill is not None and not question.unsettled:
            self._fetched(question.prefill)
        leading = next((at for at, key in enumerate(keys) if key not in question.held), len(keys))
        self._ram.touch(keys[:leading])
        fresh, question.turns = leading - question.turns, leading
        wait_s = self._network.wait_s(fresh * self._block_bytes, now_s) if fresh else 0.0
        return PeerAnswer(
            [None if key in question.unsettled else key in question.held for key in keys], wait_s
        )

    def _fetched(self, name: str) -> None:
        prefill = self._prefills.get(name)
        if prefill is not None:
            self._ram.unpin(prefill.parked)
            prefill.parked.clear()

    def _forget(self, name: str, prefill: _Prefill) -> None:
        self._ram.unpin(prefill.parked)
        prefill.parked.clear()
        if self._prefills.get(name) is prefill:
            del self._prefills[name]
