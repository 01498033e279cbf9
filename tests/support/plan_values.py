# SPDX-License-Identifier: Apache-2.0
"""Random questions and costs: few blocks and few sizes, so that ends of spans, chunks and prompts meet."""

from __future__ import annotations

import itertools

import msgspec
from hypothesis import strategies as st

from router.costs.model import CERTAIN, CostChanges, CostModel, Doubts, Link
from router.costs.profile import load_profile
from router.plan.candidate import Candidate, Question, Residence, Source, Span

WORKERS = ("a", "b", "c", "d", "e", "f")
SIZE = 16
_PROFILE = load_profile("default")

seconds = st.one_of(st.just(0.0), st.floats(1e-6, 0.01), st.floats(0.001, 3.0))


class DifferentCosts:
    """Constants of each worker, and of the links that are not like the rest."""

    def __init__(
        self, models: dict[str, CostModel], usual: Link, links: dict[tuple[str, str], Link] | None = None
    ) -> None:
        self._models = models
        self._usual = usual
        self._links = links or {}

    def model_for(self, worker: str) -> CostModel:
        return self._models[worker]

    def link(self, source: str, destination: str) -> Link:
        return self._links.get((source, destination), self._usual)

    def doubts(self, worker: str, source: str | None, peer_s: float) -> Doubts:
        return CERTAIN

    def watch(self) -> CostChanges:
        changes = CostChanges()
        changes.links.update(self._links)
        return changes


@st.composite
def profiles(draw: st.DrawFn) -> CostModel:
    """Every path is the cheapest in some of them."""
    tokens_per_s = st.floats(2e3, 2e6)
    return CostModel(
        msgspec.structs.replace(
            _PROFILE,
            prefill_start_s=draw(seconds),
            prefill_s_per_token=1 / draw(tokens_per_s),
            prefill_s_per_token_squared=draw(st.sampled_from([0.0, 1e-9, 1e-7])),
            kv_bytes_per_token=1.0,
            admit_s=draw(st.floats(0, 0.02)),
            step_tokens=draw(st.sampled_from([32.0, 100.0, 8192.0])),
            decode_start_s=draw(st.floats(0.001, 0.05)),
            decode_s_per_request=draw(st.floats(0, 0.01)),
            ram_start_s=draw(seconds),
            ram_bytes_per_s=draw(tokens_per_s),
            storage_start_s=draw(seconds),
            storage_bytes_per_s=draw(tokens_per_s),
        )
    )


links = st.builds(
    Link,
    connect_s=seconds,
    lookup_s=seconds,
    bytes_per_s=st.floats(2e3, 2e6),
    share_exponent=st.sampled_from([1.0, 1.0, 0.5]),
)


@st.composite
def spans(draw: st.DrawFn, blocks: int = 40) -> tuple[Span, ...]:
    """Sorted, not overlapping, maybe touching; often from the first block on."""
    edges = sorted(draw(st.sets(st.integers(0, blocks), max_size=6)))
    if draw(st.booleans()):
        edges = sorted({0, *edges})
    if draw(st.integers(0, 3)) == 0:
        return tuple(itertools.pairwise(edges))
    return tuple(zip(edges[::2], edges[1::2], strict=False))


residences = st.builds(Residence, spans(), spans(), spans())
fingerprints = st.sampled_from(["", "", "", "other"])
trusts = st.one_of(st.just(1.0), st.floats(0.05, 1.0))


occupancy: dict[str, st.SearchStrategy[int]] = {
    "fresh_tokens": st.integers(0, 700),
    "resident_tokens": st.integers(0, 1200),
    "kv_capacity_tokens": st.sampled_from([0, 999, 1000]),
}
"""Of HBM, unknown or filled to any degree, beyond its end included."""


def candidates(prompts: int) -> st.SearchStrategy[Candidate]:
    return st.builds(
        Candidate,
        worker=st.sampled_from(WORKERS),
        dp_rank=st.integers(0, 99),
        block_size_tokens=st.sampled_from([SIZE, SIZE, SIZE, 8]),
        chunk_blocks=st.sampled_from([1, 1, 2, 3, 8]),
        residence=st.lists(residences, min_size=prompts, max_size=prompts),
        queue_s=seconds,
        decodes=st.integers(0, 8),
        can_pull=st.booleans(),
        pulls=st.sampled_from([0, 1, 0.5, 7 / 3, 4]),
        sessions=st.frozensets(st.sampled_from(WORKERS)),
        trust=trusts,
        fingerprint=fingerprints,
        extension=st.booleans(),
        **occupancy,
    )


sources = st.builds(
    Source,
    worker=st.sampled_from(WORKERS),
    dp_rank=st.integers(0, 3),
    host=st.just("host"),
    port=st.just(1),
    residence=residences,
    pulls=st.sampled_from([0, 1, 0.5, 7 / 3, 4]),
    trust=trusts,
    fingerprint=fingerprints,
    p2p=st.booleans(),
    extension=st.booleans(),
    extension_address=st.just("host:2"),
)


@st.composite
def prefixes(draw: st.DrawFn, blocks: int = 40) -> tuple[Span, ...]:
    """Most of a prompt from its first block on, or from near it; now and then in pieces."""
    start, end = draw(st.sampled_from([0, 0, 0, 0, 1, 7])), draw(st.integers(10, blocks))
    middle = draw(st.integers(start + 1, end - 1))
    gap = draw(st.sampled_from([None, None, 0, 1]))
    return ((start, end),) if gap is None or middle + gap >= end else ((start, middle), (middle + gap, end))


@st.composite
def extended_questions(draw: st.DrawFn) -> Question:
    """One long prompt, workers with our extension that have little of it, sources that have most of it."""
    ours = {"extension": st.just(True), "fingerprint": st.just(""), "can_pull": st.booleans()}
    few = st.one_of(st.just(Residence()), residences)
    asked = st.lists(
        st.builds(
            Candidate,
            worker=st.sampled_from(WORKERS[:2]),
            dp_rank=st.integers(0, 99),
            block_size_tokens=st.just(SIZE),
            chunk_blocks=st.sampled_from([1, 1, 2, 3]),
            residence=st.lists(few, min_size=1, max_size=1),
            queue_s=seconds,
            decodes=st.integers(0, 8),
            pulls=st.sampled_from([0, 0.5, 2]),
            sessions=st.frozensets(st.sampled_from(WORKERS)),
            trust=trusts,
            **ours,
            **occupancy,
        ),
        min_size=1,
        max_size=3,
        unique_by=lambda one: (one.worker, one.dp_rank),
    )
    held = st.builds(
        Source,
        worker=st.sampled_from(WORKERS[1:]),
        dp_rank=st.integers(0, 3),
        host=st.just("host"),
        port=st.just(1),
        residence=st.builds(Residence, ram=prefixes()),
        pulls=st.sampled_from([0, 1, 2.5, 6]),
        trust=trusts,
        fingerprint=st.just(""),
        p2p=st.booleans(),
        extension=st.sampled_from([True, True, True, False]),
        extension_address=st.just("host:2"),
    )
    return Question(
        prompt_tokens=[draw(st.integers(20 * SIZE, 41 * SIZE))],
        candidates=draw(asked),
        sources=draw(st.lists(held, min_size=2, max_size=6)),
        pressure=draw(st.sampled_from([0.0, 0.5, 3.0])),
    )


@st.composite
def questions(draw: st.DrawFn) -> Question:
    lengths = st.integers(0, 41 * SIZE)
    tokens = draw(
        st.one_of(st.lists(lengths, min_size=1, max_size=1), st.lists(lengths, min_size=1, max_size=3))
    )
    # A rank is a candidate once.
    found = draw(
        st.lists(
            candidates(len(tokens)), min_size=1, max_size=5, unique_by=lambda one: (one.worker, one.dp_rank)
        )
    )
    return Question(
        prompt_tokens=tokens,
        candidates=found,
        sources=draw(st.lists(sources, max_size=7)) if len(tokens) == 1 else (),
        output_tokens=draw(st.integers(1, 500)),
        slo_tpot_s=draw(st.one_of(st.none(), st.floats(0.001, 0.05))),
        pressure=draw(st.sampled_from([0.0, 0.5, 3.0])),
    )


@st.composite
def costs(draw: st.DrawFn) -> DifferentCosts:
    alike = draw(profiles())
    models = {name: draw(profiles()) if draw(st.booleans()) else alike for name in WORKERS}
    pairs = st.tuples(st.sampled_from(WORKERS), st.sampled_from(WORKERS))
    return DifferentCosts(models, draw(links), draw(st.dictionaries(pairs, links, max_size=4)))
