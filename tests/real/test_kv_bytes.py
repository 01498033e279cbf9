# SPDX-License-Identifier: Apache-2.0
"""A real engine's counters against the KV bytes per token that its config.json says."""

from __future__ import annotations

import json
import urllib.request

import pytest

from router.costs.kv_bytes import kv_bytes_per_token
from router.fleet.metrics_text import parse_worker_metrics

from .engine import BLOCK_SIZE_TOKENS, MODEL_NAME, RealWorker
from .events import next_seq, stored, wait_for_events
from .prompts import token_ids

Pair = tuple[RealWorker, RealWorker]
BLOCKS = 50


def complete(worker: RealWorker, prompt: list[int]) -> None:
    worker.post("/v1/completions", {"model": MODEL_NAME, "prompt": prompt, "max_tokens": 1})


def reported(worker: RealWorker) -> float | None:
    with urllib.request.urlopen(worker.url + "/metrics", timeout=10) as answer:
        return parse_worker_metrics(answer.read()).kv_bytes_per_token


def test_loads_show_the_kv_bytes_that_the_models_config_says(real_p2p_pair: Pair) -> None:
    worker = real_p2p_pair[0]
    prompt = token_ids(BLOCKS * BLOCK_SIZE_TOKENS)
    start = next_seq(worker.replay)
    complete(worker, prompt)
    wait_for_events(worker.replay, start, lambda events: len(stored(events, "CPU")) >= BLOCKS)
    # Four thousand loaded tokens are the fewest that are taken to tell.
    for _ in range(5):
        worker.post("/reset_prefix_cache")
        complete(worker, prompt)
    config = json.loads((worker.model_dir / "config.json").read_text())
    assert reported(worker) == pytest.approx(kv_bytes_per_token(config), rel=0.05)
