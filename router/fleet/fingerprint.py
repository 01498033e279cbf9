# SPDX-License-Identifier: Apache-2.0
"""Whether two workers can exchange KV blocks at all, by what is known of them. Pure.

Engines compare a fingerprint of their own when they connect (vLLM's P2P handshake: configuration, block length, hash
seed) and refuse; a plan that ends so costs the request its lookup. What polling shows is compared before.
"""

from __future__ import annotations

from router.fleet.worker import WorkerStatus


def fingerprint(status: WorkerStatus, base_model: str) -> str:
    """Equal for workers that may exchange blocks of ``base_model``; what is unknown counts as equal to itself only.

    Parts: path of the weights, block size, chunk, dtype of the cache, and the operator's own word.
    """
    root = next(
        (info.root for info in status.models.values() if info.base == base_model and info.lora is None), None
    )
    parts = (
        root or base_model,
        status.block_size_tokens,
        status.spec.chunk_blocks,
        status.cache_dtype,
        status.spec.fingerprint,
    )
    return "|".join("" if part is None else str(part) for part in parts)
