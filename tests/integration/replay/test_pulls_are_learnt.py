# SPDX-License-Identifier: Apache-2.0
"""Questions about shared documents: more of them than fit in HBM, some of them hot. Eight workers, virtual time.

Pulls are worth while here, and the profile believes them to be four times slower than they are. A busy fleet would
find out by itself, since pulls save GPU seconds and queues hide their time; so what a GPU second costs others is left
out of the decisions here, and pulls are hardly ever chosen.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from random import Random

import msgspec
import pytest

from engine_ext.sim.config import SimConfig
from engine_ext.sim.profile import load_profile as load_engine_profile
from router.costs.profile import CostProfile, load_profile
from router.replay.traces import MOONCAKE_BLOCK_TOKENS, TraceRequest
from router.replay.virtual import VirtualFleet, VirtualFleetSetup

DOCUMENTS = 200
QUESTION_TOKENS = 512
LINK_BYTES_PER_S = 5e9
ENGINE = SimConfig(
    block_size_tokens=64, hbm_blocks=2_400, ram_blocks=32_768, max_model_len=200_000, track_identity=False
)
SELFISH = {"decode_s_per_request": 1e-9}
"""Nothing is given up for those that decode: what is left is each request's own time."""
TRUE_PULLS = SELFISH | {"peer_bytes_per_s": LINK_BYTES_PER_S, "peer_lookup_s": 0.002, "peer_connect_s": 0.05}
TOO_SLOW = SELFISH | {"peer_bytes_per_s": LINK_BYTES_PER_S / 4, "peer_lookup_s": 0.008, "peer_connect_s": 0.2}


def questions(seed: int, count: int = 900, rate_per_s: float = 6.0) -> list[TraceRequest]:
    """Documents of 8 to 40 thousand tokens, asked about with Zipf's frequencies."""
    random = Random(seed)
    blocks = [Random(one).randrange(16, 80) for one in range(DOCUMENTS)]
    weights = [1 / (rank + 1) ** 1.1 for rank in range(DOCUMENTS)]
    requests, at_s = [], 0.0
    for index in range(count):
        at_s += random.expovariate(rate_per_s)
        document = random.choices(range(DOCUMENTS), weights)[0]
        ids = (*(document * 1000 + block for block in range(blocks[document])), 1_000_000 + index)
        tokens = len(ids) * MOONCAKE_BLOCK_TOKENS
        requests.append(TraceRequest(at_s, tokens, 100, ids, MOONCAKE_BLOCK_TOKENS, index))
    return requests


@dataclass(frozen=True)
class Result:
    mean_ttft_s: float
    pulls: int
    trials: int
    lost: float
    decisions: int
    fit_bytes_per_s: float


def replay(profile: CostProfile, seed: int, explore: float) -> Result:
    setup = VirtualFleetSetup(
        workers=8,
        engine=ENGINE,
        engine_profile=msgspec.structs.replace(
            load_engine_profile("default"), peer_bytes_per_s=LINK_BYTES_PER_S
        ),
        cost_profile=profile,
        policy="kv_aware",
        calibrate=True,
        explore=explore,
    )
    fleet = VirtualFleet(setup)
    answered = fleet.run(questions(seed))
    assert fleet.calibration is not None
    result = Result(
        mean_ttft_s=statistics.mean(one.ttft_s or 0.0 for one in answered),
        pulls=sum(one.source is not None for one in answered),
        trials=fleet.explorer.trials if fleet.explorer else 0,
        lost=fleet.explorer.lost if fleet.explorer else 0.0,
        decisions=len(answered),
        fit_bytes_per_s=fleet.calibration.snapshot()["fleet"]["peer_bytes_per_s"]["fit"],
    )
    print(f"seed {seed} explore {explore}: {result}")
    return result


SEEDS = (1, 2, 3)


@pytest.fixture(autouse=True)
def selfish_decisions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("router.plan.pressure.MOST", 0.0)
    # Nor for those that wait for room: as where it is not known how much there is.
    monkeypatch.setattr("router.fleet.worker.WorkerStatus.kv_capacity_tokens", 0)
    # Nor are prompts followed to where others like them went, which leaves little to pull.
    monkeypatch.setattr("router.replay.virtual.SPECULATIVE_S", 0.0)


def mean(results: list[Result]) -> float:
    return statistics.mean(one.mean_ttft_s for one in results)


def test_trials_find_out_that_pulls_are_fast_and_it_pays() -> None:
    wrong = msgspec.structs.replace(load_profile("default"), **TOO_SLOW)
    without = [replay(wrong, seed, 0.0) for seed in SEEDS]
    tried = [replay(wrong, seed, 0.01) for seed in SEEDS]
    assert sum(one.pulls for one in tried) > 2 * sum(one.pulls for one in without)
    for one in tried:
        assert one.trials > 0
        assert one.fit_bytes_per_s > LINK_BYTES_PER_S / 3.5, "the profile says a quarter"
        assert 0 < one.lost <= 0.01 * one.decisions + 1, (
            "what was predicted to be lost stays within the account"
        )
    assert mean(tried) < mean(without)


def test_trials_cost_little_where_nothing_is_left_to_learn() -> None:
    right = msgspec.structs.replace(load_profile("default"), **TRUE_PULLS)
    without = [replay(right, seed, 0.0) for seed in SEEDS[:2]]
    tried = [replay(right, seed, 0.01) for seed in SEEDS[:2]]
    assert mean(tried) < 1.15 * mean(without)
