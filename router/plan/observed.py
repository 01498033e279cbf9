# SPDX-License-Identifier: Apache-2.0
"""From a plan and what came of it to what calibration learns from. Pure."""

from __future__ import annotations

from router.costs.observation import Observation
from router.plan.candidate import Plan


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
