# SPDX-License-Identifier: Apache-2.0
"""An engine as the destination of pulls: what it asks the peers that a request names, and what it brings in.

vLLM 0.32, ``tiering/p2p/session/client.py``: one question for all blocks that no tier of its own has; no answer within
``peer_timeout_s`` is a miss of all that is not answered, and so is a pull that takes longer. Naming oneself is never
answered. Our extension asks each of several sources for the blocks of its range, all at once, and waits no longer than
their deadlines.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from engine_ext.sim.agenda import Action, Agenda
from engine_ext.sim.config import SimConfig
from engine_ext.sim.network import PeerNetwork
from engine_ext.sim.output import PeerLookup, SimCounters
from engine_ext.sim.profile import SimProfile
from engine_ext.sim.request import Live, PeerSource, Question


@dataclass(slots=True)
class _Pull:
    """One pull; over as soon as either outcome is known."""

    over: bool = False


class PeerClient:
    """Questions and pulls of one engine; ``lookups`` is drained by the core."""

    def __init__(
        self,
        config: SimConfig,
        profile: SimProfile,
        agenda: Agenda,
        network: PeerNetwork,
        counters: SimCounters,
        answered: Callable[[Live], None],
    ) -> None:
        """``answered``: something new is known to a request in ``Live.answers``."""
        self._config = config
        self._profile = profile
        self._agenda = agenda
        self._network = network
        self._counters = counters
        self._answered = answered
        self.lookups: list[PeerLookup] = []
        self._connected_s: dict[tuple[str, int], float] = {}
        """When the session with a peer was or will be there."""

    def ask(self, live: Live, number: int, keys: list[bytes], now_s: float) -> None:
        """Ask one of the request's sources about blocks."""
        source, waits = live.params.sources[number], live.params.waits_for_prefill
        self._counters.peer_lookups += not waits
        give_up = partial(self._give_up, live, number, keys)
        timeout = self._agenda.at(self._limit_s(live, source, now_s), give_up)
        live.questions[number] = Question(keys, now_s, timeout)
        if (source.host, source.port) != self._config.p2p_address:
            self.lookups.append(
                PeerLookup(
                    live.request.request_id,
                    source.kv_request_id,
                    source.host,
                    source.port,
                    tuple(keys),
                    waits,
                    number,
                )
            )

    def _limit_s(self, live: Live, source: PeerSource, now_s: float) -> float:
        """When a question or a pull that begins now is given up."""
        limit_s = now_s + self._profile.peer_timeout_s
        if source.deadline_s is not None:
            limit_s = max(min(limit_s, live.submitted_s + source.deadline_s), now_s)
        return limit_s

    def answer(
        self, live: Live, number: int, hits: Sequence[bool | None] | None, now_s: float, wait_s: float
    ) -> None:
        """A source has answered; None or silence ends in ``peer_timeout_s`` after the question."""
        question = live.questions.get(number)
        if question is None or hits is None:
            return
        at_s = max(now_s, self._soonest_s(live, live.params.sources[number], question))
        self._agenda.at(at_s, partial(self._take_answer, live, number, question, list(hits), wait_s))

    def _soonest_s(self, live: Live, source: PeerSource, question: Question) -> float:
        """When an answer can be here: behind the session and, for a lookup, the way there and back."""
        connect_s = self._profile.peer_connect_s
        connected_s = self._connected_s.setdefault((source.host, source.port), question.at_s + connect_s)
        way_s = 0.0 if live.params.waits_for_prefill else self._profile.peer_lookup_s
        return max(question.at_s, connected_s) + way_s

    def _give_up(self, live: Live, number: int, keys: list[bytes], now_s: float) -> None:
        question = live.questions.get(number)
        if question is not None and question.keys is keys:
            self._take_answer(live, number, question, None, 0.0, now_s)

    def _take_answer(
        self,
        live: Live,
        number: int,
        question: Question,
        hits: list[bool | None] | None,
        wait_s: float,
        now_s: float,
    ) -> None:
        if live.questions.get(number) is not question:
            return  # answered before, or asked again since
        keys = question.keys
        if hits is None:
            self._counters.peer_timeouts += 1
            said: list[bool | None] = [live.answers.get(key, False) for key in keys]
        else:
            said = [*hits[: len(keys)], *[False] * (len(keys) - len(hits))]
        live.answers.update((key, hit) for key, hit in zip(keys, said, strict=True) if hit is not None)
        live.pull_from_s[number] = max(live.pull_from_s.get(number, 0.0), now_s + wait_s)
        if None not in said:
            self._all_said(live, number, now_s)
        self._answered(live)

    def _all_said(self, live: Live, number: int, now_s: float) -> None:
        question = live.questions.pop(number)
        question.timeout.cancel()
        if not live.params.waits_for_prefill:
            live.moved.lookups += 1
            live.moved.lookup_s += now_s - question.at_s

    def forget(self, live: Live) -> None:
        """The request waits for no answer any more."""
        for question in live.questions.values():
            question.timeout.cancel()
        live.questions.clear()

    def pull(
        self, live: Live, number: int, size_bytes: float, start_s: float, done: Action, failed: Action
    ) -> None:
        """Bring bytes in from one of the request's sources; one of ``done`` and ``failed`` is called in time."""
        self._agenda.at(start_s, partial(self._begin, live, number, size_bytes, done, failed))

    def _begin(
        self, live: Live, number: int, size_bytes: float, done: Action, failed: Action, now_s: float
    ) -> None:
        source = live.params.sources[number]
        pull = _Pull()

        def ends(action: Action, at_s: float) -> None:
            # The network's clock is not the agenda's: what follows belongs to the engine's own time.
            self._agenda.at(at_s, partial(ended, action))

        def ended(action: Action, at_s: float) -> None:
            if not pull.over:
                pull.over = True
                timeout.cancel()
                action(at_s)

        def give_up(at_s: float) -> None:
            cancel(at_s)
            ended(failed, at_s)

        timeout = self._agenda.at(self._limit_s(live, source, now_s), give_up)
        address = (source.host, source.port)
        cancel = self._network.pull(address, size_bytes, now_s, partial(ends, done), partial(ends, failed))
