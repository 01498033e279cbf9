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


def offload(worker: RealWorker, prompt: list[int], **more: Any) -> str:
    """Runs a prompt that RAM lacks and returns its text once the engine has said that its full chunks are there."""
    start = next_seq(worker.replay)
    answer = text(complete(worker, prompt, **more))
    config = worker.config.offload or worker.config.extension
    assert config is not None
    chunks = len(prompt) // (B * config.blocks_per_chunk)
    wait_for_events(worker.replay, start, lambda events: len(_chunks_in_ram(events, prompt)) >= chunks)
    return answer


def _chunks_in_ram(events: list[dict[str, Any]], prompt: list[int]) -> list[dict[str, Any]]:
    """The RAM stores of this prompt's chunks: those of an earlier one may be announced as late."""
    blocks = {tuple(prompt[i : i + B]) for i in range(0, len(prompt), B)}
    own = {
        block
        for event in stored(events, "GPU")
        if tuple(event["token_ids"][:B]) in blocks
        for block in event["block_hashes"]
    }
    return [event for event in stored(events, "CPU") if own >= set(event["block_hashes"])]


def heads(worker: RealWorker, prompt: list[int]) -> list[str]:
    """How every head of the prompt goes on, that is the first block, two blocks, and so on.

    The whole prompt cannot tell whether each block is in its place: keys hold their positions, so attention to all
    blocks minds no order of them.
    """
    return [text(complete(worker, prompt[: end * B + 1])) for end in range(1, len(prompt) // B)]


def assert_heads(worker: RealWorker, prompt: list[int], expected: list[str]) -> None:
    """Every head of the prompt is cached there, and goes on as expected: each block is in its place."""
    for end, wanted in enumerate(expected, 1):
        answer = complete(worker, prompt[: end * B + 1])
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == end * B
        assert text(answer) == wanted, f"after {end} blocks"


def forget_hbm(worker: RealWorker) -> None:
    worker.post("/reset_prefix_cache")
