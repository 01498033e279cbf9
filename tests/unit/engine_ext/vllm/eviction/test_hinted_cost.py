# SPDX-License-Identifier: Apache-2.0
"""The router predicts seconds of whole prompts; the policy knows their whole chunks only."""

from __future__ import annotations

from random import Random

from engine_ext.vllm.eviction.core import EvictionCore
from engine_ext.vllm.plan import EvictHints

CHUNK = 512
BASE_S, SLOPE_S = 6e-5, 6e-9


def test_the_cost_of_attention_is_learnt_though_the_ends_of_prompts_are_no_whole_chunks() -> None:
    core: EvictionCore[int] = EvictionCore(1000)
    random = Random(1)
    for number in range(2000):
        # Most prompts are short: what is missing of them is a large part.
        tokens = int(random.lognormvariate(8.0, 1.2))
        seconds = BASE_S * tokens + SLOPE_S * tokens * tokens / 2
        chain = [((number, end), end) for end in range(CHUNK, tokens + 1, CHUNK)]
        core.visit(chain, float(number), EvictHints(rebuild_s=seconds))
    learnt = core._rebuild.attention_per_token
    assert abs(learnt / (SLOPE_S / BASE_S) - 1) < 0.15
