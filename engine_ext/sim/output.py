# SPDX-License-Identifier: Apache-2.0
"""What the engine core hands out: tokens, usage, events, questions to peers, counters."""

from __future__ import annotations

from array import array
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from engine_ext.sim.events import KvEvent
from engine_ext.sim.hashing import ExtraKeys
from engine_ext.sim.request import Tier


class TokenOutput(NamedTuple):
    """One sampled token."""

    request_id: str
    token_id: int
    finished: bool
    first: bool


@dataclass(frozen=True, slots=True)
class SimUsage:
    """Token counts of one finished request. ``cached_tokens`` is the sum over ``cached_by_tier``."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    cached_by_tier: dict[Tier, int]


@dataclass(frozen=True, slots=True)
class Finished:
    """A request has ended by itself."""

    request_id: str
    usage: SimUsage
    reason: str
    """``length`` or ``stop``."""
    computed_blocks: Sequence[bytes] = ()
    """Full blocks of the prompt that were not cached, by their engine hashes."""


@dataclass(frozen=True, slots=True)
class PeerLookup:
    """Ask the peer at ``host:port`` which blocks its RAM holds, then call ``answer_lookup`` with what it says."""

    request_id: str
    kv_request_id: str
    host: str
    port: int
    block_hashes: tuple[bytes, ...]
    waits: bool = False
    """``remote_prefiller``: the peer computes them under that ``kv_request_id``, and says of each when it is there."""
    source: int = 0
    """Its number among the request's sources."""


@dataclass(frozen=True, slots=True)
class PeerAnswer:
    """What a source says: per block whether it has it, and how long its link is busy with others."""

    hits: list[bool | None]
    """None: not known yet, another answer will follow."""
    wait_s: float

    @property
    def is_last(self) -> bool:
        """Whether all is said."""
        return None not in self.hits


@dataclass(frozen=True, slots=True)
class PeerReply:
    """A later answer to the question asked under ``ticket``."""

    ticket: Hashable
    answer: PeerAnswer


@dataclass(slots=True)
class StepOutput:
    """Everything that happened during one ``advance``, in order."""

    tokens: list[TokenOutput] = field(default_factory=list)
    finished: list[Finished] = field(default_factory=list)
    kv_batches: list[list[KvEvent]] = field(default_factory=list)
    """One list per published message; the sequence number is theirs to count."""
    lookups: list[PeerLookup] = field(default_factory=list)
    replies: list[PeerReply] = field(default_factory=list)
    """Later answers to others' questions (``SimEngine.serve_lookup``)."""


@dataclass(slots=True)
class SimCounters:
    """Totals since the engine started; tokens unless named otherwise."""

    prefix_cache_queries: int = 0
    prefix_cache_hits: int = 0
    external_queries: int = 0
    external_hits: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    cached_by_tier: dict[Tier, int] = field(default_factory=lambda: dict.fromkeys(Tier, 0))
    finished_requests: int = 0
    aborted_requests: int = 0
    preemptions: int = 0
    steps: int = 0
    peer_lookups: int = 0
    peer_timeouts: int = 0
    failed_pulls: int = 0


@dataclass(frozen=True, slots=True)
class SimMetrics:
    """The engine's gauges and counters at one moment."""

    running: int
    waiting: int
    kv_cache_usage: float
    """0 to 1."""
    ram_blocks: int
    storage_blocks: int
    asleep: bool
    counters: SimCounters

    @property
    def cached_by_source(self) -> dict[str, int]:
        """Cached prompt tokens under the names of ``vllm:prompt_tokens_cached_by_source_total``."""
        names = {Tier.HBM: "device", Tier.RAM: "host", Tier.STORAGE: "disk", Tier.PEER: "p2p"}
        return {names[tier]: tokens for tier, tokens in self.counters.cached_by_tier.items()}


@dataclass(frozen=True, slots=True)
class BlockTruth:
    """One block the engine really holds, and what it stands for (empty without identity tracking)."""

    block_hash: bytes
    parent: bytes | None
    token_ids: array[int]
    extra_keys: ExtraKeys | None
    lora_name: str | None
    hbm_copies: int
    in_ram: bool
    in_storage: bool
