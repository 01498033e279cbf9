# SPDX-License-Identifier: Apache-2.0
"""PointsmanPolicy under vLLM's own manager, and in a real engine whose RAM is too small for its traffic."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from router.costs.kv_bytes import kv_bytes_per_token

from .asking import B, Workers, cached, complete, forget_hbm, offload, text
from .engine import RealWorker, WorkerConfig
from .engineless import run
from .events import next_seq, removed, wait_for_events
from .imports import Version
from .launch import Extension
from .prompts import token_ids
from .stage import Stage

pytestmark = pytest.mark.real

CHUNK = 2 * B
RAM_CHUNKS = 12


def test_vllms_manager_and_the_policy_agree_over_random_requests(
    real_stage: Stage, vllm_version: Version
) -> None:
    script = Path(__file__).with_name("policy_rounds.py")
    counts = json.loads(run(real_stage.home, script, version=vllm_version, timeout_s=300).splitlines()[-1])
    assert counts["counted_malformed"] == counts["malformed"] > 50
    for what in ("evicted", "refused", "hits", "failed", "resets"):
        assert counts[what] > 0, what


@pytest.fixture
def worker(real_workers: Workers, real_stage: Stage) -> RealWorker:
    """Its RAM holds twelve chunks."""
    model = json.loads((real_stage.home / "model/config.json").read_text())
    extension = Extension(
        policy="PointsmanPolicy",
        cpu_bytes=RAM_CHUNKS * CHUNK * kv_bytes_per_token(model),
        blocks_per_chunk=2,
    )
    (one,) = real_workers(WorkerConfig(extension=extension))
    return one


def planned(**hints: Any) -> dict[str, Any]:
    return {"pointsman": {"plan_id": "p", "evict": hints}}


def test_an_engine_evicts_by_our_policy_keeps_a_pinned_prefix_and_answers_as_when_cold(
    worker: RealWorker,
) -> None:
    pinned = token_ids(4 * CHUNK + 5)
    others = [token_ids(4 * CHUNK + 5) for _ in range(8)]
    start = next_seq(worker.replay)
    cold = text(complete(worker, pinned, kv_transfer_params=planned(pinned_tokens=4 * CHUNK)))
    texts = [offload(worker, prompt) for prompt in others]
    evicted = len(others) * 4 + 4 - RAM_CHUNKS
    wait_for_events(worker.replay, start, lambda events: _removed_chunks(events) >= evicted)
    forget_hbm(worker)
    assert cached(worker, pinned) == 4 * CHUNK
    assert text(complete(worker, pinned)) == cold
    assert [text(complete(worker, prompt)) for prompt in others] == texts


def _removed_chunks(events: list[dict[str, Any]]) -> int:
    return sum(len(event["block_hashes"]) for event in removed(events, "CPU"))
