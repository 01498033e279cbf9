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
from router.plan.candidate import EXPECTED_OUTPUT_TOKENS, NOTHING, Candidate, Question, Residence, Source
from router.plan.disaggregation import Disaggregation
from router.plan.handover import Prefiller
from router.plan.holders import Holders
from router.plan.load import Board
from router.plan.native_fleet import NativeFleet
from router.plan.native_question import FleetAsked
from router.plan.planner import Planned
from router.plan.policies import Policy
from router.plan.pressure import Pressure

_Rank = tuple[str, int]
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
    ) -> None:
        """``disaggregation`` None: no request is split. ``trust`` in a worker's map by (worker, time); None is full.

        ``allow_unfingerprinted_peers``: workers with our extension may pull from stock ones.
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
        residence = self._residence(prompts, [*candidates, *prefillers, *peers]) if prompts else {}
        count = len(prompts.token_ids) if prompts else 1
        model = prompts.namespace.model if prompts else ""
        ranks = [
            self._candidate(status, rank, residence, count, model, now_s)
            for status in candidates
            for rank in range(status.spec.ranks)
            if pinned_rank is None or rank == pinned_rank or pinned_rank >= status.spec.ranks
        ]
        self._pressure.observe(sum(one.queue_s > 0 for one in ranks), max(len(ranks), 1))
        question = Question(
            prompt_tokens=[len(ids) for ids in prompts.token_ids] if prompts else [estimated_tokens],
            candidates=ranks,
            sources=self._sources(peers, residence, model, now_s)
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
            able = self._prefillers(prefillers, residence, model, now_s)
            planned = self._disaggregation.improve(question, planned, able, transfers, random)
        return Decision(
            planned=planned,
            index_version=version,
            index_age_s=self._index_age_s(candidates, now_s),
            indexed=any(status.spec.id in self._holders.workers() for status in candidates),
            question=question,
            prefillers=able,
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
        )

    def _residence(
        self, prompts: Prompts, statuses: Iterable[WorkerStatus]
    ) -> Mapping[_Rank, list[Residence]]:
        """Per rank, one residence per prompt; each distinct block size is hashed once."""
        by_size: dict[int, set[str]] = {}
        for status in statuses:
            if status.block_size_tokens:
                by_size.setdefault(status.block_size_tokens, set()).add(status.spec.id)
        found: dict[_Rank, list[Residence]] = {}
        for size, workers in by_size.items():
            for i, ids in enumerate(prompts.token_ids):
                for rank, residence in self._match(prompts, ids, size).items():
                    if rank[0] in workers:
                        found.setdefault(rank, [NOTHING] * len(prompts.token_ids))[i] = residence
        return found

    def _match(self, prompts: Prompts, ids: array[int], block_size: int) -> dict[_Rank, Residence]:
        salt = [prompts.cache_salt] if prompts.cache_salt else []
        hashes = self._holders.index.hash_blocks(
            ids, block_size, prompts.namespace.model, prompts.namespace.lora or "", salt
        )
        return residences(self._holders.runs(hashes), self._holders)

    def _candidate(
        self,
        status: WorkerStatus,
        rank: int,
        residence: Mapping[_Rank, Sequence[Residence]],
        prompts: int,
        model: str,
        now_s: float,
    ) -> Candidate:
        worker = status.spec.id
        return Candidate(
            worker=worker,
            dp_rank=rank,
            block_size_tokens=status.block_size_tokens or 1,
            chunk_blocks=status.spec.chunk_blocks,
            residence=residence.get((worker, rank)) or [NOTHING] * prompts,
            queue_s=self._board.queue_s(worker, rank, now_s),
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
        )

    def _prefillers(
        self,
        statuses: Sequence[WorkerStatus],
        residence: Mapping[_Rank, Sequence[Residence]],
        model: str,
        now_s: float,
    ) -> list[Prefiller]:
        found = []
        for status in statuses:
            spec = status.spec
            if spec.transfer is None:
                continue
            for rank in range(spec.ranks):
                candidate = self._candidate(status, rank, residence, 1, model, now_s)
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
                            residence=held[0],
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
