# SPDX-License-Identifier: Apache-2.0
"""What a decision was made of, kept so that it can be made again under other constants or policies. Pure.

The question, restricted to the best candidates and to the sources that the planner tried, with the constants that
it was priced with. No token, no block hash and no address is in it. As JSON it is arrays of arrays: about 120 bytes
per candidate, and 150 more where each worker has constants of its own.

The structs have the attributes of ``Question``, ``Candidate``, ``Source`` and ``Residence``, so the native planner
reads them as they are; ``question_of`` makes the real ones, for whatever else decides.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from router.costs.model import Costs
from router.decisions.constants import (
    NO_LINK,
    AlikeCosts,
    ConstantsRows,
    RecordedCosts,
    Row,
    RowReader,
    layout_of,
)
from router.plan.candidate import NOTHING, Candidate, Plan, Question, Residence, Source, Span
from router.plan.planner import most_useful

KEPT_CANDIDATES = 16
"""Of a decision, the best first."""

Spans = tuple[Span, ...]


class PlanSettings(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What the planner was configured with."""

    gpu_seconds_weight: float
    pull_deadline_s: float
    min_pull_tokens: int


class ResidenceInputs(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Blocks of one prompt by tier."""

    hbm: Spans = ()
    ram: Spans = ()
    storage: Spans = ()


class SourceInputs(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A rank that could be pulled from."""

    worker: str
    dp_rank: int
    residence: ResidenceInputs
    """Only of RAM."""
    pulls: float
    trust: float
    fingerprint: int
    """Position in ``fingerprints``."""
    p2p: bool
    extension: bool


class CandidateInputs(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A rank that could take the request."""

    worker: str
    dp_rank: int
    block_size_tokens: int
    chunk_blocks: int
    residence: tuple[ResidenceInputs, ...]
    """Per prompt."""
    queue_s: float
    decodes: int
    in_flight: int
    can_pull: bool
    pulls: float
    sessions: tuple[str, ...]
    """Workers of the kept sources that it has a session with."""
    prefill_tokens: int
    active_tokens: int
    trust: float
    fingerprint: int
    """Position in ``fingerprints``."""
    constants: int
    """Position in ``constants``."""
    links: tuple[int, ...]
    """Position in ``links`` per source; empty where it cannot pull."""
    extension: bool
    fresh_tokens: int = 0
    resident_tokens: int = 0
    kv_capacity_tokens: int = 0
    speculative_tokens: int = 0


class DecisionInputs(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Everything that a decision depends on."""

    layout: str
    """``LAYOUT`` of the version that wrote it."""
    settings: PlanSettings
    prompt_tokens: tuple[int, ...]
    output_tokens: int
    slo_tpot_s: float | None
    pressure: float
    prefillers: int
    """Ranks that might have computed the prompt for a candidate; they are not kept."""
    fingerprints: tuple[str, ...]
    constants: tuple[Row, ...]
    links: tuple[Row, ...]
    sources: tuple[SourceInputs, ...]
    candidates: tuple[CandidateInputs, ...]
    """Best first, as they were ranked."""


LAYOUT = layout_of(PlanSettings, ResidenceInputs, SourceInputs, CandidateInputs, DecisionInputs)
"""Stands for what the numbers mean and their order: inputs of another version are told apart, not misread."""
READABLE = frozenset({LAYOUT, "6182ca63", "ec32e865"})
"""Layouts of this version, of one whose candidates end before ``speculative_tokens``, and of one whose candidates end
before ``fresh_tokens``: nothing waited for room there."""


def best_candidates(question: Question, ranking: Sequence[Plan]) -> list[Candidate]:
    """Those that are kept, in the order of the ranking that came of the question. O(candidates)."""
    kept = {(plan.worker, plan.dp_rank): i for i, plan in enumerate(ranking[:KEPT_CANDIDATES])}
    found = [one for one in question.candidates if (one.worker, one.dp_rank) in kept]
    return sorted(found, key=lambda one: kept[one.worker, one.dp_rank])


def inputs_of(
    question: Question,
    kept: Sequence[Candidate],
    rows: ConstantsRows,
    settings: PlanSettings,
    prefillers: int = 0,
) -> DecisionInputs:
    """The inputs of a decision of which the candidates ``kept`` are kept, the best first.

    To be called before the costs learn anything new. Some tens of microseconds.
    """
    sources = most_useful(question.sources)
    names = {source.worker for source in sources}
    fingerprints: dict[str, int] = {}
    constants: dict[Row, int] = {}
    links: dict[Row, int] = {}
    kept_sources = tuple(
        SourceInputs(
            one.worker,
            one.dp_rank,
            ResidenceInputs(ram=one.residence.ram),
            one.pulls,
            one.trust,
            fingerprints.setdefault(one.fingerprint, len(fingerprints)),
            one.p2p,
            one.extension,
        )
        for one in sources
    )
    candidates = tuple(
        CandidateInputs(
            one.worker,
            one.dp_rank,
            one.block_size_tokens,
            one.chunk_blocks,
            tuple(ResidenceInputs(part.hbm, part.ram, part.storage) for part in one.residence),
            one.queue_s,
            one.decodes,
            one.in_flight,
            one.can_pull,
            one.pulls,
            tuple(names & one.sessions) if one.sessions else (),
            one.prefill_tokens,
            one.active_tokens,
            one.trust,
            fingerprints.setdefault(one.fingerprint, len(fingerprints)),
            constants.setdefault(rows.of_worker(one.worker), len(constants)),
            tuple(links.setdefault(rows.of_link(source.worker, one.worker), len(links)) for source in sources)
            if one.can_pull or one.extension
            else (),
            one.extension,
            one.fresh_tokens,
            one.resident_tokens,
            one.kv_capacity_tokens,
            one.speculative_tokens,
        )
        for one in kept
    )
    return DecisionInputs(
        LAYOUT,
        settings,
        tuple(question.prompt_tokens),
        question.output_tokens,
        question.slo_tpot_s,
        question.pressure,
        prefillers,
        tuple(fingerprints),
        tuple(constants),
        tuple(links),
        kept_sources,
        candidates,
    )


def question_of(inputs: DecisionInputs) -> Question:
    """The restricted question. Addresses of sources are not kept and are empty."""
    return Question(
        prompt_tokens=inputs.prompt_tokens,
        candidates=[_candidate(one, inputs) for one in inputs.candidates],
        sources=[_source(one, inputs) for one in inputs.sources],
        output_tokens=inputs.output_tokens,
        slo_tpot_s=inputs.slo_tpot_s,
        pressure=inputs.pressure,
    )


def costs_of(inputs: DecisionInputs, reader: RowReader) -> Costs:
    """The costs that the restricted question is priced with."""
    models = [reader.model(row) for row in inputs.constants]
    links = [reader.link(row) for row in inputs.links]
    if len(models) == 1 and len(links) < 2:
        return AlikeCosts(models[0], links[0] if links else NO_LINK)
    return RecordedCosts(
        {one.worker: models[one.constants] for one in inputs.candidates},
        {one.worker: i for i, one in enumerate(inputs.sources)},
        {one.worker: [links[i] for i in one.links] for one in inputs.candidates if one.links},
    )


def inputs_view(inputs: DecisionInputs) -> dict[str, object]:
    """The inputs with names, for people to read."""
    return {name: _named(getattr(inputs, name)) for name in inputs.__struct_fields__}


def _named(value: object) -> object:
    if isinstance(value, msgspec.Struct):
        return {name: _named(getattr(value, name)) for name in value.__struct_fields__}
    return [_named(one) for one in value] if isinstance(value, tuple) else value


def _candidate(one: CandidateInputs, inputs: DecisionInputs) -> Candidate:
    return Candidate(
        worker=one.worker,
        dp_rank=one.dp_rank,
        block_size_tokens=one.block_size_tokens,
        chunk_blocks=one.chunk_blocks,
        residence=[_residence(part) for part in one.residence],
        queue_s=one.queue_s,
        decodes=one.decodes,
        in_flight=one.in_flight,
        can_pull=one.can_pull,
        pulls=one.pulls,
        sessions=frozenset(one.sessions),
        prefill_tokens=one.prefill_tokens,
        active_tokens=one.active_tokens,
        trust=one.trust,
        fingerprint=inputs.fingerprints[one.fingerprint],
        extension=one.extension,
        fresh_tokens=one.fresh_tokens,
        resident_tokens=one.resident_tokens,
        kv_capacity_tokens=one.kv_capacity_tokens,
        speculative_tokens=one.speculative_tokens,
    )


def _source(one: SourceInputs, inputs: DecisionInputs) -> Source:
    return Source(
        worker=one.worker,
        dp_rank=one.dp_rank,
        host="",
        port=0,
        residence=_residence(one.residence),
        pulls=one.pulls,
        trust=one.trust,
        fingerprint=inputs.fingerprints[one.fingerprint],
        p2p=one.p2p,
        extension=one.extension,
    )


def _residence(part: ResidenceInputs) -> Residence:
    return Residence(part.hbm, part.ram, part.storage) if part.hbm or part.ram or part.storage else NOTHING
