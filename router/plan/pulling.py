# SPDX-License-Identifier: Apache-2.0
"""What a worker with our extension pulls, and what that takes: from one source, or from several at once. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from router.costs.model import CostModel, Costs, Link, SourceShare
from router.plan.candidate import Candidate, Pull, Source
from router.plan.paths import PEER, Loads, Walk, derive_walk
from router.plan.split import Holder, Need, Part, chunk_runs, missing_chunks, splits


class SplitPulls(NamedTuple):
    """A walk over several sources, priced."""

    loads: Loads
    pulls: tuple[Pull, ...]
    expected_blocks: float
    """Of those pulled, that will be there."""
    peer_s: float


def single_pull(
    costs: CostModel, link: Link, candidate: Candidate, source: Source, walk: Walk, cap: int | None
) -> Pull:
    """The only pull of a walk that pulls something, cut short after ``cap`` blocks behind HBM, or whole."""
    start, end = walk.pulled(cap) or (0, 0)
    blocks, others = walk.loads(cap).peer, max(candidate.pulls, source.pulls)
    connected = source.worker in candidate.sessions
    seconds = costs.pull_s(blocks * candidate.block_size_tokens, others, connected=connected, link=link)
    first = start // candidate.chunk_blocks * candidate.chunk_blocks
    return Pull(source, first, end, blocks, seconds, others, connected)


def ends_with_pulls(walk: Walk, cap: int, candidate: Candidate) -> bool:
    """Whether the engine finds nothing behind its ranges, so that they need no cap beside them."""
    return walk.place_behind(cap) == PEER and not candidate.residence[0].storage


def split_pulls(
    costs: Costs, candidate: Candidate, prompt_tokens: int, able: Sequence[Source]
) -> Iterator[SplitPulls]:
    """The splits that are worth a look, whole. ``able``: sources that the candidate can pull from."""
    model, residence = costs.model_for(candidate.worker), candidate.residence[0]
    size, chunk = candidate.block_size_tokens, candidate.chunk_blocks
    links = [costs.link(source.worker, candidate.worker) for source in able]
    holders = [
        Holder(
            source.worker,
            chunk_runs(source.residence.ram, chunk),
            link.share_bytes_per_s(max(candidate.pulls, source.pulls)),
            link.start_s(connected=source.worker in candidate.sessions),
        )
        for source, link in zip(able, links, strict=True)
    ]
    begin, end = missing_chunks(prompt_tokens, size, chunk, residence)
    if end - begin < 2:
        return
    chunk_bytes = chunk * size * model.profile.kv_bytes_per_token
    held = begin * chunk * size
    compute_s = model.prefill_s(held, prompt_tokens - held, candidate.decodes) / (end - begin)
    need = Need(
        begin,
        end,
        chunk_bytes,
        compute_s - chunk_bytes / model.profile.ram_bytes_per_s,
        # Its own link carries at least what the fastest pair does.
        max(link.share_bytes_per_s(candidate.pulls) for link in links),
    )
    for parts in splits(holders, need):
        walk = derive_walk(
            prompt_tokens, size, chunk, residence, ((parts[0].start * chunk, parts[-1].end * chunk),)
        )
        shares = [
            SourceShare(
                walk.pulled_within(part.start * chunk, part.end * chunk) * size,
                holders[part.holder].start_s,
                holders[part.holder].bytes_per_s,
            )
            for part in parts
        ]
        if all(share.tokens for share in shares):
            yield _priced(model, candidate, able, parts, shares, walk.loads(), need.bytes_per_s)


def _priced(
    model: CostModel,
    candidate: Candidate,
    able: Sequence[Source],
    parts: Sequence[Part],
    shares: Sequence[SourceShare],
    loads: Loads,
    capacity_bytes_per_s: float,
) -> SplitPulls:
    size, chunk = candidate.block_size_tokens, candidate.chunk_blocks
    pulls, expected_blocks = [], 0.0
    for part, share in zip(parts, shares, strict=True):
        source, blocks = able[part.holder], share.tokens // size
        expected_blocks += source.trust * blocks
        pulls.append(
            Pull(
                source,
                part.start * chunk,
                part.end * chunk,
                blocks,
                model.share_s(share, loads.peer * size, capacity_bytes_per_s),
                max(candidate.pulls, source.pulls),
                source.worker in candidate.sessions,
            )
        )
    return SplitPulls(loads, tuple(pulls), expected_blocks, model.pulls_s(shares, capacity_bytes_per_s))
