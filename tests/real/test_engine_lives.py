# SPDX-License-Identifier: Apache-2.0
"""The harness itself: a worker that is killed, frozen or restarted leaves nothing behind and comes back."""

from __future__ import annotations

import os
import urllib.error
from pathlib import Path

import pytest

from .engine import MODEL_NAME, RealWorker
from .events import next_seq
from .prompts import token_ids

SHARED_MEMORY = "/dev/shm"  # noqa: S108


def segments() -> set[str]:
    return {
        name for name in os.listdir(SHARED_MEMORY) if name.startswith(("vllm_offload_", "psm_", "sem.mp-"))
    }


def alive(group: int) -> bool:
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[2]) == group and fields[0] != "Z":
            return True
    return False


def test_a_killed_worker_leaves_nothing_and_returns_at_its_address_with_a_new_sequence(
    real_p2p_pair: tuple[RealWorker, RealWorker],
) -> None:
    worker, other = real_p2p_pair
    worker.post("/v1/completions", {"model": MODEL_NAME, "prompt": token_ids(40), "max_tokens": 1})
    assert worker.process is not None
    group, url, before = worker.process.pid, worker.url, segments()

    worker.kill()
    assert not alive(group)
    assert segments() < before
    with pytest.raises(urllib.error.URLError):
        worker.get("/v1/models")

    worker.start_again()
    assert worker.url == url
    assert next_seq(worker.replay) == 0
    assert other.alive


def test_a_frozen_worker_answers_nothing_until_it_thaws(real_pair: tuple[RealWorker, RealWorker]) -> None:
    worker = real_pair[0]
    worker.pause()
    try:
        with pytest.raises(TimeoutError):
            worker.get("/v1/models", timeout_s=0.5)
    finally:
        worker.resume()
    assert worker.get("/v1/models")["data"]
