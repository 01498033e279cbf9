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
    """It may pull through vLLM's P2P protocol."""
    pulls: float = 0
    """Pulls that cross its link now; each of the sources of one request counts for its share."""
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
    extension: bool = False
    """It runs our engine extension: it pulls from others that do, and from several sources at once."""
    fresh_tokens: int = 0
    """Of the prompts, in full blocks: those not shared with a request in flight there, which need room of their own."""
    resident_tokens: int = 0
    """Distinct prompt tokens in flight there."""
    kv_capacity_tokens: int = 0
    """Of its HBM; 0 where it is not known."""
    speculative_tokens: int = 0
    """Of the residences: in HBM once the engine has scheduled what was sent there lately; no event tells of them yet."""

    def can_pull_from(self, source: Source) -> bool:
        """Whether the engine can carry out a pull from there, and both hold the same kind of blocks.

        Never from itself: vLLM stalls for its handshake time-out when a request names its own worker.
        """
        common = (self.extension and source.extension) or (self.can_pull and source.p2p)
        return common and source.worker != self.worker and source.fingerprint == self.fingerprint


@dataclass(frozen=True, slots=True)
class Source:
    """A rank that peers can pull from: alive, with an address for it, known to hold blocks in RAM."""

    worker: str
    dp_rank: int
    host: str
    """Of the control channel of vLLM's P2P tier."""
    port: int
    residence: Residence
    pulls: float
    """The same of its own link."""
    trust: float = 1.0
    fingerprint: str = ""
    p2p: bool = True
    """It serves pulls through vLLM's P2P protocol."""
    extension: bool = False
    """It serves pulls of our engine extension."""
    extension_address: str = ""
    """``host:port`` of the control channel for those."""


class Pull(NamedTuple):
    """What a worker with our extension takes from one source."""

    source: Source
    start_block: int
    end_block: int
    """Blocks ``[start, end)`` of the prompt, whole chunks; those that the worker holds itself are not pulled."""
    blocks: int
    """Those that are pulled."""
    seconds: float
    """Session, lookup and transfer, as predicted."""
    other_pulls: float
    """That share the busier of the two links, the other sources of the same plan left out."""
    connected: bool
    """The pair has a session."""

    @property
    def kind(self) -> str:
        """By which protocol, as ``engine_ext.vllm.plan`` names them."""
        return "pointsman" if self.source.extension else "p2p"


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
    displaced_s: float = 0.0
    """What others lose, no part of ``total_s``: those whose blocks give way to what the plan brings into HBM, and those
    that wait for room in it (``router.plan.displacement``)."""

    @property
    def total_s(self) -> float:
        """Time to first token: loading goes on while others compute, so the longer of the two waits counts."""
        load_s = max(self.admit_s, self.remote_s) + self.ram_s + self.peer_s + self.storage_s
        return max(self.queue_s, load_s) + self.prefill_s


class Circumstances(NamedTuple):
    """What a plan was priced with, besides its blocks and its queue."""

    decodes: int = 0
    other_pulls: float = 0
    """Pulls that share the busier link; of several sources each pull has its own."""
    connected: bool = True
    """The pair has a session; the same."""


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
    """``terms.total_s``, the weight of the GPU seconds burnt, ``terms.decode_s`` and ``terms.displaced_s``; what is
    minimised."""
    source: Source | None = None
    """Of several the first."""
    max_load_tokens: int | None = None
    """Tokens to be loaded behind the HBM hit at most; None leaves it to the engine, 0 is nothing."""
    use_storage: bool = True
    """False: the engine would find blocks in storage, and recomputing them is cheaper."""
    circumstances: Circumstances = ALONE
    handover: Handover | None = None
    """Another worker computes the prompt and hands its blocks over; they count as ``peer``."""
    trial: bool = False
    """Chosen to learn what it takes, not because it is the cheapest."""
    pulls: tuple[Pull, ...] = ()
    """In the order of the prompt; only of a worker with our extension."""
    extension: bool = False
    """The worker runs it."""

    @property
    def source_workers(self) -> tuple[str, ...]:
        """Those whose links the pulls of this plan cross."""
        if self.pulls:
            return tuple(pull.source.worker for pull in self.pulls)
        return (self.source.worker,) if self.source is not None else ()
