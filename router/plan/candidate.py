# SPDX-License-Identifier: Apache-2.0
"""What the planner looks at: prompts, candidates and sources, as plain values of one instant."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from indexer.identity import Tier

if TYPE_CHECKING:
    from router.plan.handover import Handover

EXPECTED_OUTPUT_TOKENS = 256
"""Of an answer whose length nothing is known of."""

Span = tuple[int, int]
"""Blocks ``[start, end)``."""


@dataclass(frozen=True, slots=True)
class Residence:
    """Which blocks of one prompt a rank can reach by itself, as sorted spans per tier."""

    hbm: tuple[Span, ...] = ()
    ram: tuple[Span, ...] = ()
    storage: tuple[Span, ...] = ()

    def spans(self, tier: Tier) -> tuple[Span, ...]:
        return (self.hbm, self.ram, self.storage)[tier]


NOTHING = Residence()


@dataclass(frozen=True, slots=True)
class Candidate:
    """One rank of a worker that may take the request."""

    worker: str
    dp_rank: int
    block_size_tokens: int
    chunk_blocks: int
    residence: Sequence[Residence]
    """Per prompt of the request."""
    queue_s: float
    """Prefill seconds promised to this rank and not seen done."""
    decodes: int
    """Requests decoding there now."""
    in_flight: int = 0
    """Our requests at the worker."""
    can_pull: bool = False
    """Its engine has the P2P tier."""
    pulls: int = 0
    """Pulls that cross its link now."""
    sessions: AbstractSet[str] = frozenset()
    """Sources it is connected to."""
    prefill_tokens: int = 0
    """Prompt tokens that it has yet to compute for our requests."""
    active_tokens: int = 0
    """Prompt tokens of all our requests there, the decoding ones included."""
    trust: float = 1.0
    """Share of the blocks promised there that were there, of late."""
    fingerprint: str = ""
    """What must be equal at a source: blocks of another model, dtype or layout are of no use."""


@dataclass(frozen=True, slots=True)
class Source:
    """A rank that peers can pull from: alive, with a P2P address, known to hold blocks in RAM."""

    worker: str
    dp_rank: int
    host: str
    port: int
    residence: Residence
    pulls: int
    """Pulls that cross its link now."""
    trust: float = 1.0
    fingerprint: str = ""


@dataclass(frozen=True, slots=True)
class Question:
    """Everything one decision depends on."""

    prompt_tokens: Sequence[int]
    """Length of each prompt."""
    candidates: Sequence[Candidate]
    sources: Sequence[Source] = ()
    """Empty unless the request is one sequence."""
    output_tokens: int = EXPECTED_OUTPUT_TOKENS
    """Expected length of the answer, per sequence."""
    slo_tpot_s: float | None = None
    """Seconds per output token that the client can bear."""
    pressure: float = 0.0
    """Seconds that a GPU second costs the requests to come (``router.plan.pressure``)."""
    explore: bool = False
    """Whether a plan may be a trial: it will be carried out, and its time to first token seen."""


class Terms(NamedTuple):
    """Seconds of a plan, one per term of the cost."""

    queue_s: float = 0.0
    admit_s: float = 0.0
    ram_s: float = 0.0
    peer_s: float = 0.0
    storage_s: float = 0.0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    """What the answers lose, no part of ``total_s``: this one beyond the time per output token asked for, and, times
    ``gpu_seconds_weight``, what it and those that decode beside it take from each other."""
    remote_s: float = 0.0
    """Until another worker has computed the prompt."""

    @property
    def total_s(self) -> float:
        """Time to first token: loading goes on while others compute, so the longer of the two waits counts."""
        load_s = max(self.admit_s, self.remote_s) + self.ram_s + self.peer_s + self.storage_s
        return max(self.queue_s, load_s) + self.prefill_s


class Circumstances(NamedTuple):
    """What a plan was priced with, besides its blocks and its queue."""

    decodes: int = 0
    other_pulls: int = 0
    """Pulls that share the busier link."""
    connected: bool = True
    """The pair has a session."""


ALONE = Circumstances()


@dataclass(frozen=True, slots=True)
class Plan:
    """A worker with a path for every block, and what it is predicted to cost."""

    worker: str
    dp_rank: int
    block_size_tokens: int
    prompt_blocks: int
    """Blocks of the prompts, the last partial ones included."""
    path_blocks: Mapping[str, int]
    """Blocks by path: hbm, ram, peer, storage, recompute; zeros left out."""
    cached_tokens: int
    """What the engine should report as cached."""
    terms: Terms
    score_s: float
    """``terms.total_s``, the weight of the GPU seconds burnt and ``terms.decode_s``; what is minimised."""
    source: Source | None = None
    max_load_tokens: int | None = None
    """Tokens to be loaded behind the HBM hit at most; None leaves it to the engine, 0 is nothing."""
    use_storage: bool = True
    """False: the engine would find blocks in storage, and recomputing them is cheaper."""
    circumstances: Circumstances = ALONE
    handover: Handover | None = None
    """Another worker computes the prompt and hands its blocks over; they count as ``peer``."""
    trial: bool = False
    """Chosen to learn what it takes, not because it is the cheapest."""
