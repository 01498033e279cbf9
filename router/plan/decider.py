# SPDX-License-Identifier: Apache-2.0
"""From what is known now (index, load, workers) to a ranked decision. No I/O; time and chance are arguments.

The same code decides for live requests, for a dry run and for a trace replayed in virtual time.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from random import Random

from indexer.holders import SlotOwner
from indexer.identity import BlockRun, Namespace, Tier, WorkerId
from router.fleet.fingerprint import fingerprint
from router.fleet.worker import Health, Transfer, WorkerStatus, address_text, rank_address, reads_p2p
from router.plan.candidate import (
    EXPECTED_OUTPUT_TOKENS,
    NOTHING,
    Candidate,
    Plan,
    Question,
    Residence,
    Source,
)
from router.plan.disaggregation import Disaggregation
from router.plan.handover import Prefiller
from router.plan.holders import Holders
from router.plan.load import Board, InFlight, Resident
from router.plan.native_fleet import NativeFleet
from router.plan.native_question import FleetAsked
from router.plan.planner import Planned
from router.plan.policies import Policy
from router.plan.pressure import Pressure
from router.plan.residents import NONE_LEADING, Leading
from router.plan.speculation import SPECULATIVE_S, expected, hbm_blocks, lasting_s, loading_s

_Rank = tuple[str, int]
_HASH_BYTES = 8
_SERVING_PEERS = (Health.HEALTHY, Health.DRAINING)


@dataclass(frozen=True, slots=True)
class Prompts:
    """The tokenised prompts of one request and what else enters their block hashes."""

    token_ids: Sequence[array[int]]
    namespace: Namespace
    cache_salt: str | None = None
    single_sequence: bool = True
    """Only then may the engine be told to pull: an id shared by two sequences breaks its session."""
    output_tokens: int = EXPECTED_OUTPUT_TOKENS
    """Expected length of the answer, per sequence."""
    slo_tpot_s: float | None = None
    """Seconds per output token that the client can bear."""

    @property
    def tokens(self) -> int:
        return sum(len(ids) for ids in self.token_ids)


def _no_hashes(_block_size_tokens: int) -> Sequence[bytes]:
    return ()


@dataclass(frozen=True, slots=True)
class _Matched:
    """What is known of prompts at the ranks: what of them is cached there, and what is in flight."""

    prompts: int
    residence: Mapping[_Rank, Sequence[Residence]]
    in_flight: Mapping[int, tuple[int, InFlight]]
    """By block size: full blocks of all prompts, and what of them each rank has in flight."""

    def leading(self, worker: str, dp_rank: int, block_size: int | None) -> Sequence[Leading]:
        """Per prompt, what the rank has in flight of it."""
        found = self.in_flight.get(block_size or 0)
        return (NONE_LEADING,) * self.prompts if found is None else found[1](worker, dp_rank)

    def fresh_tokens(self, leading: Sequence[Leading], block_size: int | None) -> int:
        found = self.in_flight.get(block_size or 0)
        if found is None or not block_size:
            return 0
        return (found[0] - sum(one.shared for one in leading)) * block_size


@dataclass(frozen=True, slots=True)
class Decision:
    """A ranking and the state of the index it was made on."""

    planned: Planned
    index_version: int
    index_age_s: float | None
    """Since the newest event of any candidate; None when none has ever published."""
    indexed: bool
    """Whether the events of any candidate are followed at all."""
    question: Question | None = None
    """What was asked, for the record."""
    prefillers: Sequence[Prefiller] = ()
    """Ranks that might have computed the prompt for a candidate."""
    hashes: Callable[[int], Sequence[bytes]] = _no_hashes
    """By block size, the block hashes of each prompt, 8 bytes each, as far as they were looked up."""

    def resident(self, plan: Plan) -> Resident:
        """What the prompts take room for at the worker of a plan."""
        size = plan.block_size_tokens
        return Resident(size, tuple(self.hashes(size)), loading_s(plan))


class Decider:
    """Builds the question and asks the policy."""

    def __init__(
        self,
        holders: Holders,
        board: Board,
        policy: Policy,
        *,
        use_peers: bool,
        disaggregation: Disaggregation | None = None,
        trust: Callable[[str, float], float] | None = None,
        fleet: NativeFleet | None = None,
        allow_unfingerprinted_peers: bool = False,
        speculative_s: float = SPECULATIVE_S,
    ) -> None:
        """``disaggregation`` None: no request is split. ``trust`` in a worker's map by (worker, time); None is full.

        ``allow_unfingerprinted_peers``: workers with our extension may pull from stock ones. ``speculative_s``: for how
        long what was sent to a rank counts as held there, though no event tells of it; 0: not at all.
        ``fleet``: where the policy's planner is the native one, what it needs to answer without an object per candidate.
        """
        self._holders = holders
        self._board = board
        self._use_peers = use_peers
        self._disaggregation = disaggregation
        self._trust = trust or _full_trust
        self._pressure = Pressure()
        self.fleet = fleet
        self._allow_unfingerprinted = allow_unfingerprinted_peers
        self._speculative_s = lasting_s(speculative_s)
        self.policy = policy

    def decide(
        self,
        prompts: Prompts | None,
        candidates: Sequence[WorkerStatus],
        peers: Sequence[WorkerStatus],
        now_s: float,
        random: Random,
        *,
        pinned_rank: int | None = None,
        estimated_tokens: int = 0,
        prefillers: Sequence[WorkerStatus] = (),
        explore: bool = False,
    ) -> Decision:
        """Rank ``candidates``; ``peers`` may serve as sources, ``prefillers`` compute the prompt for a candidate.

        ``prompts`` None: decide by load alone, for a prompt of about ``estimated_tokens``. ``explore``: the plan will
        be carried out and its time to first token seen, so it may be a trial.

        Raises:
            ValueError: there are no candidates.
        """
        if self.fleet is not None and not prefillers:
            asked = _asked(prompts, pinned_rank, estimated_tokens)
            return self._decide_natively(
                self.fleet, asked, prompts, candidates, peers, now_s, random, explore
            )
        version = self._holders.index.version
        hashes = _hashed(self._holders, prompts, [*candidates, *prefillers, *peers]) if prompts else {}
        count = len(prompts.token_ids) if prompts else 1
        matched = self._match(hashes, count, [*candidates, *prefillers, *peers])
        model = prompts.namespace.model if prompts else ""
        ranks = [
            self._candidate(status, rank, matched, model, now_s)
            for status in candidates
            for rank in range(status.spec.ranks)
            if pinned_rank is None or rank == pinned_rank or pinned_rank >= status.spec.ranks
        ]
        self._pressure.observe(sum(one.queue_s > 0 for one in ranks), max(len(ranks), 1))
        question = Question(
            prompt_tokens=[len(ids) for ids in prompts.token_ids] if prompts else [estimated_tokens],
            candidates=ranks,
            sources=self._sources(peers, matched.residence, model, now_s)
            if prompts and prompts.single_sequence
            else (),
            output_tokens=prompts.output_tokens if prompts else EXPECTED_OUTPUT_TOKENS,
            slo_tpot_s=prompts.slo_tpot_s if prompts else None,
            pressure=self._pressure.weight,
            explore=explore and count == 1,
        )
        planned = self.policy.rank(question, random)
        able: Sequence[Prefiller] = ()
        if self._disaggregation is not None and prefillers and prompts and prompts.single_sequence:
            transfers = {status.spec.id: status.spec.transfer for status in candidates}
            able = self._prefillers(prefillers, matched, model, now_s)
            planned = self._disaggregation.improve(question, planned, able, transfers, random)
        return Decision(
            planned=planned,
            index_version=version,
            index_age_s=self._index_age_s(candidates, now_s),
            indexed=any(status.spec.id in self._holders.workers() for status in candidates),
            question=question,
            prefillers=able,
            hashes=lambda block_size: hashes.get(block_size, ()),
        )

    def _decide_natively(
        self,
        fleet: NativeFleet,
        asked: FleetAsked,
        prompts: Prompts | None,
        candidates: Sequence[WorkerStatus],
        peers: Sequence[WorkerStatus],
        now_s: float,
        random: Random,
        explore: bool,
    ) -> Decision:
        survey = fleet.ask(asked, candidates, peers, now_s)
        self._pressure.observe(survey.busy, max(survey.ranks, 1))
        question = Question(
            prompt_tokens=[len(ids) for ids in prompts.token_ids] if prompts else [asked.estimated_tokens],
            candidates=survey.candidates,
            sources=survey.candidates.sources,
            output_tokens=prompts.output_tokens if prompts else EXPECTED_OUTPUT_TOKENS,
            slo_tpot_s=prompts.slo_tpot_s if prompts else None,
            pressure=self._pressure.weight,
            explore=explore and (prompts is None or len(prompts.token_ids) == 1),
        )
        planned = self.policy.rank(question, random)
        outcome = survey.candidates.outcome
        newest_s = outcome.newest_event_s
        return Decision(
            planned=planned,
            index_version=outcome.index_version,
            index_age_s=None if newest_s is None else max(now_s - newest_s, 0.0),
            indexed=outcome.indexed,
            question=question,
            hashes=outcome.hashes,
        )

    def _match(
        self,
        hashes: Mapping[int, Sequence[bytes]],
        prompts: int,
        statuses: Iterable[WorkerStatus],
    ) -> _Matched:
        by_size: dict[int, set[str]] = {}
        for status in statuses:
            by_size.setdefault(status.block_size_tokens or 0, set()).add(status.spec.id)
        found: dict[_Rank, list[Residence]] = {}
        in_flight: dict[int, tuple[int, InFlight]] = {}
        for size, each in hashes.items():
            blocks = sum(len(one) for one in each) // _HASH_BYTES
            in_flight[size] = blocks, self._board.leading(Resident(size, each))
            for i, packed in enumerate(each):
                for rank, residence in residences(self._holders.runs(packed), self._holders).items():
                    if rank[0] in by_size[size]:
                        found.setdefault(rank, [NOTHING] * prompts)[i] = residence
        return _Matched(prompts, found, in_flight)

    def _candidate(
        self,
        status: WorkerStatus,
        rank: int,
        matched: _Matched,
        model: str,
        now_s: float,
    ) -> Candidate:
        worker, size = status.spec.id, status.block_size_tokens
        leading = matched.leading(worker, rank, size)
        known = matched.residence.get((worker, rank)) or [NOTHING] * matched.prompts
        queue_s = self._board.queue_s(worker, rank, now_s)
        times = now_s - self._speculative_s, now_s + queue_s
        residence = [
            expected(one, there.shared) if times[0] <= there.ready_s <= times[1] else one
            for one, there in zip(known, leading, strict=True)
        ]
        return Candidate(
            worker=worker,
            dp_rank=rank,
            block_size_tokens=status.block_size_tokens or 1,
            chunk_blocks=status.spec.chunk_blocks,
            residence=residence,
            queue_s=queue_s,
            decodes=self._board.decodes(worker, rank, now_s),
            in_flight=self._board.in_flight(worker),
            can_pull=self._use_peers and reads_p2p(status.spec, self._allow_unfingerprinted),
            pulls=self._board.pulls(worker),
            sessions=self._board.sessions(worker),
            prefill_tokens=self._board.prefill_tokens(worker, rank),
            active_tokens=self._board.active_tokens(worker, rank),
            trust=self._trust(worker, now_s),
            fingerprint=fingerprint(status, model),
            extension=status.spec.extension is not None,
            fresh_tokens=matched.fresh_tokens(leading, size),
            resident_tokens=self._board.resident_tokens(worker, rank),
            kv_capacity_tokens=status.kv_capacity_tokens,
            speculative_tokens=(hbm_blocks(residence) - hbm_blocks(known)) * (size or 0),
        )

    def _prefillers(
        self,
        statuses: Sequence[WorkerStatus],
        matched: _Matched,
        model: str,
        now_s: float,
    ) -> list[Prefiller]:
        found = []
        for status in statuses:
            spec = status.spec
            if spec.transfer is None:
                continue
            for rank in range(spec.ranks):
                candidate = self._candidate(status, rank, matched, model, now_s)
                if spec.transfer is Transfer.P2P:
                    found.append(Prefiller(candidate, spec.transfer, *rank_address(spec.p2p, rank)))
                else:
                    # The key of a pull belongs to another connector than the one that hands over.
                    candidate = replace(candidate, can_pull=False, extension=False)
                    found.append(Prefiller(candidate, spec.transfer))
        return found

    def _sources(
        self,
        peers: Sequence[WorkerStatus],
        residence: Mapping[_Rank, Sequence[Residence]],
        model: str,
        now_s: float,
    ) -> list[Source]:
        sources = []
        for status in peers if self._use_peers else ():
            # A source that does not answer stalls the engine for its handshake time-out.
            spec = status.spec
            if not spec.serves_peers or not status.answering or status.health not in _SERVING_PEERS:
                continue
            for rank in range(spec.ranks):
                held = residence.get((spec.id, rank))
                if held and held[0].ram:
                    host, port = rank_address(spec.p2p, rank)
                    sources.append(
                        Source(
                            worker=spec.id,
                            dp_rank=rank,
                            host=host,
                            port=port,
                            residence=Residence(ram=held[0].ram),
                            pulls=self._board.pulls(spec.id),
                            trust=self._trust(spec.id, now_s),
                            fingerprint=fingerprint(status, model),
                            p2p=spec.p2p is not None,
                            extension=spec.extension is not None,
                            extension_address=address_text(*rank_address(spec.extension, rank)),
                        )
                    )
        return sources

    def _index_age_s(self, candidates: Sequence[WorkerStatus], now_s: float) -> float | None:
        workers = self._holders.workers()
        newest = [
            rank.applied_at_s
            for status in candidates
            if (holders := workers.get(WorkerId(status.spec.id))) is not None
            for rank in holders.ranks
            if rank.applied_at_s is not None
        ]
        return max(now_s - max(newest), 0.0) if newest else None


def _hashed(holders: Holders, prompts: Prompts, statuses: Iterable[WorkerStatus]) -> dict[int, list[bytes]]:
    """By block size, the block hashes of each prompt; each distinct block size is hashed once."""
    salt = [prompts.cache_salt] if prompts.cache_salt else []
    name = prompts.namespace
    sizes = dict.fromkeys(status.block_size_tokens for status in statuses if status.block_size_tokens)
    return {
        size: [
            holders.index.hash_blocks(ids, size, name.model, name.lora or "", salt)
            for ids in prompts.token_ids
        ]
        for size in sizes
    }


def _full_trust(_worker: str, _now_s: float) -> float:
    return 1.0


def _asked(prompts: Prompts | None, pinned_rank: int | None, estimated_tokens: int) -> FleetAsked:
    if prompts is None:
        return FleetAsked((), estimated_tokens=estimated_tokens, pinned_rank=pinned_rank)
    return FleetAsked(
        prompts.token_ids,
        prompts.namespace.model,
        prompts.namespace.lora or "",
        [prompts.cache_salt] if prompts.cache_salt else (),
        prompts.single_sequence,
        pinned_rank=pinned_rank,
    )


def residences(runs: Iterable[tuple[SlotOwner, BlockRun]], holders: Holders) -> dict[_Rank, Residence]:
    """Runs of slots as residences of ranks; a store counts for every rank of the worker that attaches it.

    Doubtful RAM is left out: a plan must not promise it.
    """
    spans: dict[tuple[str, int, Tier], list[tuple[int, int]]] = {}
    for owner, run in runs:
        if run.doubtful:
            continue
        state = holders.workers().get(owner.worker)
        ranks = range(len(state.ranks)) if owner.is_store and state is not None else (owner.dp_rank,)
        for rank in ranks:
            spans.setdefault((owner.worker, rank, run.tier), []).append((run.start, run.end))
    found = {(worker, rank) for worker, rank, _ in spans}
    return {
        (worker, rank): Residence(*(tuple(spans.get((worker, rank, tier), ())) for tier in Tier))
        for worker, rank in found
    }
