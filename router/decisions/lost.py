# SPDX-License-Identifier: Apache-2.0
"""Where the prompt tokens went that were computed although they need not have been. Pure.

A prompt of n tokens, of which the engine found ``observed`` cached, ``planned`` were promised by the chosen plan and
``reach`` by the plan that covers most of it, on whatever worker and whatever it costs:

    0 ......... observed ......... planned ......... reach ......... n
                   stale             routing          workload

* stale: promised and not there.
* routing: cached in the fleet, and the chosen plan did without it (mostly because that was faster).
* workload: cached nowhere that a plan could have reached.

Together with ``observed`` they are n. Where the engine found more than was promised, that lessens routing first, then
workload: they are the same tokens. The last partial block and, where the prompt is whole blocks, the last block of a
hit in HBM can never be cached (the engine computes at least one token), so up to a block of every prompt is workload.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from router.plan.candidate import Candidate, Question, Residence, Source, Span
from router.plan.paths import derive_walk


class LostTokens(NamedTuple):
    """Prompt tokens that were computed, by why."""

    workload: int
    routing: int
    stale: int


def lost_tokens(prompt_tokens: int, reach: int, planned: int, observed: int) -> LostTokens:
    """The split; with ``observed`` it adds up to ``prompt_tokens``."""
    observed = min(max(observed, 0), prompt_tokens)
    planned = min(planned, prompt_tokens)
    reach = min(max(reach, planned), prompt_tokens)
    return LostTokens(
        workload=prompt_tokens - max(reach, observed),
        routing=max(reach - max(planned, observed), 0),
        stale=max(planned - observed, 0),
    )


def reach_tokens(question: Question, at_least: int = 0) -> int:
    """The most tokens of the prompts that one candidate could have had cached, with the help of at most one source.

    ``at_least`` is known to be reached. O(candidates + sources) where holes are rare: a walk is made only for those
    that may reach beyond the best so far.
    """
    best = at_least
    for candidate in question.candidates:
        best = max(best, _local_tokens(question, candidate, best))
    if not question.sources or len(question.prompt_tokens) != 1:
        return best
    longest = sorted(question.sources, key=lambda source: -_last(source.residence.ram))
    for candidate in question.candidates:
        if candidate.can_pull or candidate.extension:
            best = max(best, _pulled_tokens(question, candidate, longest, best))
    return best


def _local_tokens(question: Question, candidate: Candidate, best: int) -> int:
    size = candidate.block_size_tokens
    if sum(map(_end, candidate.residence)) * size <= best:
        return 0
    walks = (
        derive_walk(tokens, size, candidate.chunk_blocks, residence)
        for tokens, residence in zip(question.prompt_tokens, candidate.residence, strict=True)
    )
    return sum(walk.hbm + walk.external for walk in walks) * size


def _pulled_tokens(question: Question, candidate: Candidate, longest: Sequence[Source], best: int) -> int:
    """With the best of the sources, which come in falling order of the last block that they hold."""
    size, residence = candidate.block_size_tokens, candidate.residence[0]
    own_end = _end(residence)
    for source in longest:
        ram = source.residence.ram
        if max(own_end, _last(ram)) * size <= best:
            break
        if candidate.can_pull_from(source):
            walk = derive_walk(question.prompt_tokens[0], size, candidate.chunk_blocks, residence, ram)
            best = max(best, (walk.hbm + walk.external) * size)
    return best


def _end(residence: Residence) -> int:
    return max(_last(residence.hbm), _last(residence.ram), _last(residence.storage))


def _last(spans: Sequence[Span]) -> int:
    return spans[-1][1] if spans else 0
