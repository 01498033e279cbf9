# SPDX-License-Identifier: Apache-2.0
"""Three fleets and workloads with published measurements of llm-d's placement rules, to be replayed beside ours.

llm-d, guides/p2p-kv-cache-sharing (benchmarking/README.md and benchmark-results/gpt-oss-120b-h200.md, 2026-08):
gpt-oss-120b, one H200 a pod, 1.22 million tokens of KV in HBM, 88 GiB of RAM (2.22 million tokens), blocks of 64,
no storage tier. Which rule wins depends on the workload:

    document_qa    192 conversations, each about a document of its own, 6 questions, 128 conversations at a time
    uniform_pool   128 shared prefixes, one request after the other about any of them, 30 a second
    hot_set        64 shared prefixes, long answers, 48 a second

Modelled where the source is silent: which prefix is drawn (uniformly), what the caches hold before the measured
stage (a first stage at the lowest published rate, as theirs ran before), and 256 tokens that all conversations begin
with (the guide's workload profile).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from random import Random
from typing import Literal, get_args

from router.plan.peers import PeerPolicyName
from router.plan.policies import PolicyName
from router.replay.arrivals import ClosedLoop
from router.replay.tiers import Capacities
from router.replay.traces import TraceRequest
from router.replay.workload import Workload, open_workload

ScenarioName = Literal["document_qa", "uniform_pool", "hot_set"]
SCENARIO_NAMES: tuple[ScenarioName, ...] = get_args(ScenarioName)

PROFILE = "gpt-oss-120b-h200"
POLICIES: tuple[PolicyName | PeerPolicyName, ...] = (
    "kv_aware",
    "affinity",
    "affinity_pull",
    "load",
    "load_pull",
)
"""Ours and the four whose figures are published."""

BLOCK_TOKENS = 64
PREFIX_TOKENS = 48 * 1024
QUESTION_TOKENS = 256
CAPACITIES = Capacities(
    block_size_tokens=BLOCK_TOKENS,
    hbm_blocks=1_220_000 // BLOCK_TOKENS,
    ram_blocks=2_220_000 // BLOCK_TOKENS,
    storage_blocks=None,
)
_GREETING_TOKENS = 256
_RENDERED_PER_S = 60.0
"""Prompts of this length that the published rig turned into tokens: six renderers, about ten a second each."""
_STAGE_S = 60.0
_PAUSE_S = 30.0
"""Between two stages: the client waits until all is answered."""


@dataclass(frozen=True, slots=True)
class Scenario:
    """A fleet and its workload."""

    workers: int
    workload: Callable[[int, int | None], Workload]
    """From a seed and the most requests to be measured (None for all)."""


def document_qa(seed: int, limit: int | None = None) -> Workload:
    """Closed loop: a conversation asks again as soon as it is answered, its prompt grown by question and answer.

    ``limit`` leaves out conversations and, in proportion, those at a time. Nothing in it is left to chance.
    """
    conversations, concurrent, turns, answer_tokens = 192, 128, 6, 256
    if limit is not None:
        conversations = max(min(conversations, limit // turns), 1)
        concurrent = max(conversations * 128 // 192, 1)
    asked = [list(_conversation(number, turns, answer_tokens)) for number in range(conversations)]
    return Workload(
        title="document_qa",
        begin=lambda: ClosedLoop(asked, concurrent, 1 / _RENDERED_PER_S),
        measured=range(conversations * turns),
    )


def _conversation(number: int, turns: int, answer_tokens: int) -> Iterator[TraceRequest]:
    greeting = range(_GREETING_TOKENS // BLOCK_TOKENS)
    # Far more blocks than a conversation has, so that no two share one.
    own = (number + 1) * 10_000
    for turn in range(turns):
        tokens = PREFIX_TOKENS + (turn + 1) * QUESTION_TOKENS + turn * answer_tokens
        blocks = (*greeting, *range(own, own + tokens // BLOCK_TOKENS))
        yield _request(_GREETING_TOKENS + tokens, answer_tokens, blocks)


def uniform_pool(seed: int, limit: int | None = None) -> Workload:
    """Constant rate over 128 prefixes; a minute at 6 a second, then the measured one at 30."""
    return _pool(
        "uniform_pool", seed, limit, prefixes=128, answer_tokens=64, warm_rate_per_s=6.0, rate_per_s=30.0
    )


def hot_set(seed: int, limit: int | None = None) -> Workload:
    """Constant rate over 64 prefixes; a minute at 12 a second, then the measured one at 48."""
    return _pool(
        "hot_set", seed, limit, prefixes=64, answer_tokens=512, warm_rate_per_s=12.0, rate_per_s=48.0
    )


def _pool(
    title: str,
    seed: int,
    limit: int | None,
    *,
    prefixes: int,
    answer_tokens: int,
    warm_rate_per_s: float,
    rate_per_s: float,
) -> Workload:
    random = Random(seed)
    warm, measured = round(warm_rate_per_s * _STAGE_S), round(rate_per_s * _STAGE_S)
    measured = measured if limit is None else min(measured, limit)
    start_s = _STAGE_S + _PAUSE_S
    times = [i / warm_rate_per_s for i in range(warm)] + [start_s + i / rate_per_s for i in range(measured)]
    prefix_blocks = PREFIX_TOKENS // BLOCK_TOKENS
    question_blocks = QUESTION_TOKENS // BLOCK_TOKENS
    # The earlier stages of the published runs had asked for each prefix.
    drawn = random.sample(range(prefixes), prefixes)
    drawn += random.choices(range(prefixes), k=len(times) - prefixes)
    requests = []
    for index, (at_s, prefix) in enumerate(zip(times, drawn, strict=True)):
        first = prefix * prefix_blocks
        question = 1_000_000 + index * question_blocks
        blocks = (*range(first, first + prefix_blocks), *range(question, question + question_blocks))
        requests.append(_request(PREFIX_TOKENS + QUESTION_TOKENS, answer_tokens, blocks, at_s, index))
    return open_workload(title, requests, start_s)


def _request(
    tokens: int, answer_tokens: int, blocks: tuple[int, ...], arrival_s: float = 0.0, index: int = 0
) -> TraceRequest:
    return TraceRequest(arrival_s, tokens, answer_tokens, blocks, BLOCK_TOKENS, index)


SCENARIOS: Mapping[ScenarioName, Scenario] = {
    "document_qa": Scenario(14, document_qa),
    "uniform_pool": Scenario(16, uniform_pool),
    "hot_set": Scenario(16, hot_set),
}
