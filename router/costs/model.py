# SPDX-License-Identifier: Apache-2.0
"""Seconds of each path, from a profile's constants. Pure.

    prefill        = t0 + a * missing + b * missing * (cached + missing / 2) + steps * decodes * d
    steps          = max(1, missing / step_tokens)
    decode step    = e + d * (decodes - 1)
    load(ram)      = start + bytes / promotion bandwidth
    load(peer)     = connect, if there is no session + lookup + bytes * pulls^alpha / bandwidth + promotion
    load(peers)    = longest of their connects and lookups + longest of their transfers, none sooner than the
                     destination's link lets all their bytes through + promotion
    load(storage)  = start + bytes / read bandwidth + promotion

The quadratic term is attention: each computed token attends to all before it. Published measurements show a
pull as a floor plus a few microseconds per token, and a recompute as slightly superlinear (llm-d,
guides/p2p-kv-cache-sharing, 2026-08).

A continuous-batching engine computes, in each step, up to a budget of prompt tokens and one token of each request
that decodes, so decodes add to each step of a prefill instead of stretching it. A prefill takes whole steps; the
formula leaves the rounding out, so that it has no jumps: its error is below one step's decodes.

``pulls`` at the same time share the busier link, all included. With alpha = 1 each gets its fair share; links that
serve one pull after the other, and pulls that are over sooner than assumed, show as a smaller alpha.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from router.costs.profile import CostProfile


class Link(NamedTuple):
    """Constants of pulls from one worker by another."""

    connect_s: float
    lookup_s: float
    bytes_per_s: float
    """Of a pull that is alone."""
    share_exponent: float = 1.0
    """Alpha of the formula."""

    def start_s(self, *, connected: bool) -> float:
        """Session and lookup."""
        return (0.0 if connected else self.connect_s) + self.lookup_s

    def share_bytes_per_s(self, other_pulls: float) -> float:
        """Bandwidth of a pull with ``other_pulls`` beside it."""
        if not other_pulls:
            return self.bytes_per_s
        return self.bytes_per_s / float((1 + other_pulls) ** self.share_exponent)


class SourceShare(NamedTuple):
    """What one of several sources contributes to a plan."""

    tokens: int
    start_s: float
    """Session and lookup; the sources are asked at the same time."""
    bytes_per_s: float
    """Its part of the links, with the other pulls on them."""


class Doubts(NamedTuple):
    """Standard deviations of the logarithms of what loads are predicted to take; 0 where nothing is doubted."""

    ram: float = 0.0
    peer: float = 0.0
    storage: float = 0.0


CERTAIN = Doubts()


class Costs(Protocol):
    """Where planning finds its constants."""

    def model_for(self, worker: str) -> CostModel: ...

    def link(self, source: str, destination: str) -> Link: ...

    def doubts(self, worker: str, source: str | None, peer_s: float) -> Doubts:
        """How uncertain the loads of a plan are that pulls from ``source`` for ``peer_s`` seconds."""
        ...


class CostChanges:
    """Which constants are no longer what ``Costs`` gave before. Whoever keeps them elsewhere takes them out."""

    __slots__ = ("everything", "links", "workers")

    def __init__(self) -> None:
        self.everything = True
        """All of them, and the links that are not like the rest are those in ``links``."""
        self.workers: set[str] = set()
        self.links: set[tuple[str, str]] = set()
        """(source, destination)."""


class WatchedCosts(Costs, Protocol):
    """Costs that tell what has changed, so that not all of them have to be asked for again."""

    def watch(self) -> CostChanges:
        """A record that is kept up from now on; it starts with everything."""
        ...


class CostModel:
    """The formulas over one profile. As ``Costs``: all workers and links are alike."""

    def __init__(self, profile: CostProfile) -> None:
        self.profile = profile
        self._link = Link(
            profile.peer_connect_s,
            profile.peer_lookup_s,
            profile.peer_bytes_per_s,
            profile.peer_share_exponent,
        )

    def model_for(self, worker: str) -> CostModel:
        """Itself."""
        return self

    def link(self, source: str, destination: str) -> Link:
        """The link of the profile."""
        return self._link

    def doubts(self, worker: str, source: str | None, peer_s: float) -> Doubts:
        """None: constants that nobody learns are taken for true."""
        return CERTAIN

    def watch(self) -> CostChanges:
        """Nothing changes here."""
        return CostChanges()

    def prefill_s(self, cached_tokens: float, missing_tokens: float, decodes: int) -> float:
        """Compute ``missing_tokens`` behind ``cached_tokens``, with ``decodes`` requests decoding beside it."""
        p = self.profile
        return (
            p.prefill_start_s
            + p.prefill_s_per_token * missing_tokens
            + p.prefill_s_per_token_squared * missing_tokens * (cached_tokens + missing_tokens / 2)
            + prefill_steps(p, missing_tokens) * decodes * p.decode_s_per_request
        )

    def admit_s(self, queue_s: float) -> float:
        """Until the scheduler first looks at a request behind prefills of ``queue_s``; its loads start only then.

        It looks at the queue while a step's budget of tokens is not used up, so not before the prefills ahead fit
        into one step (vLLM 0.32, ``v1/core/sched/scheduler.py``).
        """
        step_s = self.prefill_s(0, self.profile.step_tokens, 0)
        return self.profile.admit_s + max(queue_s - step_s, 0.0)

    def decode_step_s(self, decodes: int) -> float:
        """Time per output token of a rank on which ``decodes`` requests decode and none is prefilled."""
        return self.profile.decode_start_s + self.profile.decode_s_per_request * max(decodes - 1, 0)

    def promotion_s(self, tokens: int) -> float:
        """From the worker's RAM to its GPU; 0 for nothing."""
        if tokens <= 0:
            return 0.0
        return (
            self.profile.ram_start_s + tokens * self.profile.kv_bytes_per_token / self.profile.ram_bytes_per_s
        )

    def displaced_s(self, tokens: int) -> float:
        """Seconds to promote ``tokens`` again that gave way to as many others in HBM, one by one."""
        return tokens * self.profile.kv_bytes_per_token / self.profile.ram_bytes_per_s

    def peer_s(self, tokens: int, other_pulls: float, *, connected: bool, link: Link | None = None) -> float:
        """Look up and pull ``tokens``, then promote them.

        ``other_pulls`` cross the busier of the two links too; ``connected``: the pair has a session; ``link``: the
        pair's constants where they are not those of the profile.
        """
        if tokens <= 0:
            return 0.0
        return self.pull_s(tokens, other_pulls, connected=connected, link=link) + self.promotion_s(tokens)

    def pull_s(self, tokens: int, other_pulls: float, *, connected: bool, link: Link | None = None) -> float:
        """The same without the promotion, of one token or more."""
        constants = link or self._link
        wire_s = tokens * self.profile.kv_bytes_per_token / constants.share_bytes_per_s(other_pulls)
        return constants.start_s(connected=connected) + wire_s

    def pulls_s(self, shares: Sequence[SourceShare], capacity_bytes_per_s: float) -> float:
        """Look up and pull from several sources at once, then promote.

        ``shares``: what comes from each; ``capacity_bytes_per_s``: of the destination's link, for all of them.
        """
        tokens, size = sum(one.tokens for one in shares), self.profile.kv_bytes_per_token
        slowest_s = max(one.tokens * size / one.bytes_per_s for one in shares)
        wire_s = max(slowest_s, tokens * size / capacity_bytes_per_s)
        return max(one.start_s for one in shares) + wire_s + self.promotion_s(tokens)

    def share_s(self, share: SourceShare, tokens: int, capacity_bytes_per_s: float) -> float:
        """Of ``pulls_s`` until one source is done, where ``tokens`` come from all of them."""
        size = self.profile.kv_bytes_per_token
        own_s, through_s = share.tokens * size / share.bytes_per_s, tokens * size / capacity_bytes_per_s
        return share.start_s + max(own_s, through_s)

    def storage_s(self, tokens: int) -> float:
        """Read ``tokens`` from storage, then promote them."""
        if tokens <= 0:
            return 0.0
        p = self.profile
        read_s = p.storage_start_s + tokens * p.kv_bytes_per_token / p.storage_bytes_per_s
        return read_s + self.promotion_s(tokens)

    def path_seconds(self, tokens: int) -> dict[str, float]:
        """Time to first token of a prompt of ``tokens`` on an idle worker, by the one path that holds all of it.

        The peer is idle too and the pair has a session. Whatever the path, the last token is computed.
        """
        last_s = self.profile.admit_s + self.prefill_s(tokens - 1, 1, 0)
        return {
            "hbm": last_s,
            "ram": last_s + self.promotion_s(tokens),
            "peer": last_s + self.peer_s(tokens, 0, connected=True),
            "storage": last_s + self.storage_s(tokens),
            "recompute": self.profile.admit_s + self.prefill_s(0, tokens, 0),
        }

    def crossover_tokens(self, limit: int = 1 << 24) -> int | None:
        """Fewest tokens from which a pull is faster than recomputing; None if it never is below ``limit``.

        The difference falls once a pull's cost per token is below that of computing, so bisection finds it.
        """

        def pull_wins(tokens: int) -> bool:
            seconds = self.path_seconds(tokens)
            return seconds["peer"] < seconds["recompute"]

        if not pull_wins(limit):
            return None
        low, high = 0, limit
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if pull_wins(middle) else (middle, high)
        return high


def prefill_steps(profile: CostProfile, missing_tokens: float) -> float:
    """Steps of the engine that a prefill takes, without the rounding up."""
    return max(missing_tokens / profile.step_tokens, 1.0)
