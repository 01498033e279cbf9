# SPDX-License-Identifier: Apache-2.0
"""From a plan and what came of it to what calibration learns from. Pure."""

from __future__ import annotations

from typing import NamedTuple

from router.costs.observation import DecodeObservation, Observation
from router.plan.candidate import Plan
from router.plan.load import Board


def teaches(plan: Plan) -> bool:
    """Whether its time to first token says something of one link: where blocks come from several, it does not.

    Of those the reports of our extension tell.
    """
    return len(plan.pulls) < 2


def observation(plan: Plan, prompt_tokens: int, cached_tokens: int, ttft_s: float) -> Observation:
    """``prompt_tokens`` of the only prompt, ``cached_tokens`` as the engine reported them."""
    size, blocks, around = plan.block_size_tokens, plan.path_blocks, plan.circumstances
    return Observation(
        worker=plan.worker,
        source=plan.source.worker if plan.source else None,
        prompt_tokens=prompt_tokens,
        ram_tokens=blocks.get("ram", 0) * size,
        peer_tokens=blocks.get("peer", 0) * size,
        storage_tokens=blocks.get("storage", 0) * size,
        planned_cached_tokens=plan.cached_tokens,
        cached_tokens=cached_tokens,
        decodes=around.decodes,
        other_pulls=around.other_pulls,
        connected=around.connected,
        queue_s=plan.terms.queue_s,
        ttft_s=ttft_s,
    )


class Decoding(NamedTuple):
    """The rank at the moment of an answer's first token, this answer included."""

    at_s: float
    decodes: int
    prefilled_s: float


def begin_decoding(board: Board, worker: str, dp_rank: int, now_s: float) -> Decoding:
    """To be called once the board knows of the first token."""
    return Decoding(now_s, board.decodes(worker, dp_rank, now_s), board.prefilled_s(worker, dp_rank))


def decode_observation(
    board: Board, worker: str, dp_rank: int, begun: Decoding, output_tokens: int, now_s: float
) -> DecodeObservation:
    """To be called at the end of an answer of one sequence, before the board releases it."""
    return DecodeObservation(
        worker=worker,
        decodes=(begun.decodes + board.decodes(worker, dp_rank, now_s)) / 2,
        output_tokens=output_tokens,
        decode_s=now_s - begun.at_s,
        prefill_s=max(board.prefilled_s(worker, dp_rank) - begun.prefilled_s, 0.0),
    )
