# SPDX-License-Identifier: Apache-2.0
"""An engine as the destination of pulls: what it asks the peer that a request names, and what it brings in.

vLLM 0.32, ``tiering/p2p/session/client.py``: one question for all blocks that no tier of its own has; no answer within
``peer_timeout_s`` is a miss of all that is not answered, and so is a pull that takes longer. Naming oneself is never
answered.
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
from engine_ext.sim.request import Live, PeerSource


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

    def ask(self, live: Live, keys: list[bytes], now_s: float) -> None:
        """Ask the request's source about blocks."""
        source = live.params.source
        assert source is not None  # noqa: S101 - only requests with a source get here
        live.asked, live.asked_at_s = keys, now_s
        waits = live.params.waits_for_prefill
        self._counters.peer_lookups += not waits
        give_up = partial(self._take_answer, live, keys, None, 0.0)
        live.timeout = self._agenda.at(now_s + self._profile.peer_timeout_s, give_up)
        if (source.host, source.port) != self._config.p2p_address:
            self.lookups.append(
                PeerLookup(
                    live.request.request_id,
                    source.kv_request_id,
                    source.host,
                    source.port,
                    tuple(keys),
                    waits,
                )
            )

    def answer(self, live: Live, hits: Sequence[bool | None] | None, now_s: float, wait_s: float) -> None:
        """The peer has answered; None or silence ends in ``peer_timeout_s`` after the question."""
        source, keys = live.params.source, live.asked
        if source is None or keys is None or hits is None:
            return
        at_s = max(now_s, self._soonest_s(source, live))
        self._agenda.at(at_s, partial(self._take_answer, live, keys, list(hits), wait_s))

    def _soonest_s(self, source: PeerSource, live: Live) -> float:
        """When an answer can be here: behind the session and, for a lookup, the way there and back."""
        connect_s = self._profile.peer_connect_s
        connected_s = self._connected_s.setdefault((source.host, source.port), live.asked_at_s + connect_s)
        way_s = 0.0 if live.params.waits_for_prefill else self._profile.peer_lookup_s
        return max(live.asked_at_s, connected_s) + way_s

    def _take_answer(
        self,
        live: Live,
        keys: list[bytes],
        hits: list[bool | None] | None,
        wait_s: float,
        now_s: float,
    ) -> None:
        if live.asked is not keys:
            return  # answered before, or asked again since
        if hits is None:
            self._counters.peer_timeouts += 1
            said: list[bool | None] = [live.answers.get(key, False) for key in keys]
        else:
            said = [*hits[: len(keys)], *[False] * (len(keys) - len(hits))]
        live.answers.update((key, hit) for key, hit in zip(keys, said, strict=True) if hit is not None)
        live.pull_from_s = max(live.pull_from_s, now_s + wait_s)
        if None not in said:
            self._all_said(live, now_s)
        self._answered(live)

    def _all_said(self, live: Live, now_s: float) -> None:
        self.forget(live)
        if not live.params.waits_for_prefill:
            live.moved.lookups += 1
            live.moved.lookup_s += now_s - live.asked_at_s

    def forget(self, live: Live) -> None:
        """The request waits for no answer any more."""
        live.asked = None
        if live.timeout is not None:
            live.timeout.cancel()
            live.timeout = None

    def pull(
        self, source: PeerSource, size_bytes: float, start_s: float, done: Action, failed: Action
    ) -> None:
        """Bring bytes in; one of ``done`` and ``failed`` is called in time."""
        self._agenda.at(start_s, partial(self._begin, source, size_bytes, done, failed))

    def _begin(
        self, source: PeerSource, size_bytes: float, done: Action, failed: Action, now_s: float
    ) -> None:
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

        timeout = self._agenda.at(now_s + self._profile.peer_timeout_s, give_up)
        address = (source.host, source.port)
        cancel = self._network.pull(address, size_bytes, now_s, partial(ends, done), partial(ends, failed))
