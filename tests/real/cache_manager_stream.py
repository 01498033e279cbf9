# SPDX-License-Identifier: Apache-2.0
"""Event streams of vLLM's own cache manager without a model, for what the small model cannot make: run by the engine's
Python, `cache_manager_stream.py images|lookahead` prints {"rows": ..., "requests": ...} as JSON.

    images      prompts with image placeholders, salted and not: extra keys are (identifier, offset) pairs
    lookahead   block hashes that cover the two tokens behind their block, as with a drafter (vLLM 0.33 and newer)

Requests, hashing, cache manager, events and their encoding are vLLM's; only forward passes are missing.
"""

from __future__ import annotations

import base64
import json
import random
import sys
from typing import Any

import msgspec
import torch
from vllm.distributed.kv_events import KVEventBatch
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core import kv_cache_utils
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.request import Request

BLOCK = 32
PLACEHOLDER = 7
LOOKAHEAD_TOKENS = 2


class Engine:
    """Takes requests one after another; each is computed whole in one step."""

    def __init__(self, lookahead_tokens: int = 0) -> None:
        kv_cache_utils.init_none_hash(sha256)
        spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=32, dtype=torch.bfloat16)
        config = KVCacheConfig(
            num_blocks=64, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)]
        )
        more = {"num_hash_lookahead_tokens": lookahead_tokens} if lookahead_tokens else {}
        self.manager = KVCacheManager(
            config,
            max_model_len=2048,
            scheduler_block_size=BLOCK,
            hash_block_size=BLOCK,
            enable_kv_cache_events=True,
            **more,
        )
        self.hasher = kv_cache_utils.get_request_block_hasher(BLOCK, sha256, **more)
        self.encode = msgspec.msgpack.Encoder().encode
        self.rows: list[dict[str, Any]] = []
        self.requests: list[dict[str, Any]] = []

    def send(
        self, prompt: list[int], images: list[tuple[str, int, int]] | None = None, salt: str | None = None
    ) -> None:
        """``images``: (identifier, offset, length) of the placeholders in the prompt."""
        features = [
            MultiModalFeatureSpec(None, "image", name, PlaceholderRange(offset, length))
            for name, offset, length in images or ()
        ]
        request = Request(
            request_id=str(len(self.requests)),
            prompt_token_ids=prompt,
            sampling_params=SamplingParams(max_tokens=1),
            pooling_params=None,
            mm_features=features,
            cache_salt=salt,
            block_hasher=self.hasher,
        )
        computed, tokens, *_ = self.manager.get_computed_blocks(request)
        self.manager.allocate_slots(request, len(prompt) - tokens, tokens, computed)
        self.manager.free(request)
        events = self.manager.take_events()
        if events:
            payload = self.encode(KVEventBatch(ts=0.0, events=events, data_parallel_rank=0))
            row = {"topic": "", "seq": len(self.rows), "payload": base64.b64encode(payload).decode()}
            self.rows.append(row)
        self.requests.append(
            {"prompt": prompt, "salt": salt, "images": images or [], "cached_tokens": tokens}
        )


def images(rng: random.Random) -> Engine:
    engine = Engine()

    def text(count: int) -> list[int]:
        return [rng.randrange(10, 1024) for _ in range(count)]

    head = text(BLOCK)
    tail = text(2 * BLOCK)
    for name in ("cat", "dog"):
        # The image begins in the second block, ends in the third, and the text behind it is the same.
        prompt = [*head, *([PLACEHOLDER] * (BLOCK + 8)), *tail]
        for salt in (None, "tenant-a"):
            engine.send(prompt, [(name, BLOCK, BLOCK + 8)], salt)
            engine.send([*prompt, *text(BLOCK)], [(name, BLOCK, BLOCK + 8)], salt)
    engine.send([*head, *text(2 * BLOCK)])
    two = [*([PLACEHOLDER] * 8), *text(8), *([PLACEHOLDER] * 8), *text(2 * BLOCK)]
    engine.send(two, [("cat", 0, 8), ("dog", 16, 8)])
    engine.send(two, [("dog", 0, 8), ("cat", 16, 8)])
    return engine


def lookahead(rng: random.Random) -> Engine:
    engine = Engine(LOOKAHEAD_TOKENS)

    def text(count: int) -> list[int]:
        return [rng.randrange(10, 1024) for _ in range(count)]

    shared = text(3 * BLOCK)
    for tail in (text(BLOCK + 5), text(BLOCK + 5), text(2 * BLOCK)):
        engine.send(shared + tail)
    engine.send(shared + text(1))
    return engine


def main(kind: str) -> None:
    engine = {"images": images, "lookahead": lookahead}[kind](random.Random(11))
    json.dump({"rows": engine.rows, "requests": engine.requests}, sys.stdout)


if __name__ == "__main__":
    main(sys.argv[1])
