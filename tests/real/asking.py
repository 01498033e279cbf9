# SPDX-License-Identifier: Apache-2.0
"""Asking a real worker: a completion, what of it was cached, and which blocks it stored."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from typing import Any

from .engine import BLOCK_SIZE_TOKENS, MODEL_NAME, RealWorker
from .events import next_seq, stored, wait_for_events

Pair = tuple[RealWorker, RealWorker]


Workers = Callable[..., tuple[RealWorker, ...]]


B = BLOCK_SIZE_TOKENS


def complete(worker: RealWorker, prompt: list[int] | str, max_tokens: int = 4, **more: Any) -> dict[str, Any]:
    body = {
        "model": MODEL_NAME,
        "prompt": prompt,
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
    }
    answer: dict[str, Any] = worker.post("/v1/completions", body | more)
    return answer


def cached(worker: RealWorker, prompt: list[int], **more: Any) -> int:
    """`cached_tokens` as the engine reports them for this prompt now."""
    usage = complete(worker, prompt, **more)["usage"]
    assert usage["prompt_tokens"] == len(prompt)
    return int(usage["prompt_tokens_details"]["cached_tokens"])


def text(answer: dict[str, Any]) -> str:
    return str(answer["choices"][0]["text"])


def pull_from(source: RealWorker) -> dict[str, Any]:
    assert source.p2p is not None
    host, port = source.p2p.split(":")
    return {
        "remote_kv_source": {
            "kv_request_id": uuid.uuid4().hex,
            "remote_host": host,
            "remote_port": int(port),
        },
    }


def compute(worker: RealWorker, prompt: list[int], **more: Any) -> list[dict[str, Any]]:
    """Runs a prompt of at least one block and returns the HBM stores it caused, the first of them its own blocks.

    Other events may be mixed in (a full pool evicts, a reset is announced late), so they are left out here.
    """
    start = next_seq(worker.replay)
    complete(worker, prompt, **more)
    first = prompt[:BLOCK_SIZE_TOKENS]

    def announced(events: list[dict[str, Any]]) -> bool:
        return any(e["token_ids"][: len(first)] == first for e in stored(events, "GPU"))

    return stored(wait_for_events(worker.replay, start, announced), "GPU")


def offload(worker: RealWorker, prompt: list[int]) -> str:
    """Runs the prompt and returns its text once the engine has said that its full chunks are in RAM."""
    start = next_seq(worker.replay)
    answer = text(complete(worker, prompt))
    config = worker.config.offload or worker.config.extension
    assert config is not None
    chunks = len(prompt) // (B * config.blocks_per_chunk)
    wait_for_events(worker.replay, start, lambda events: len(stored(events, "CPU")) >= chunks)
    return answer


def forget_hbm(worker: RealWorker) -> None:
    worker.post("/reset_prefix_cache")
