# SPDX-License-Identifier: Apache-2.0
"""``GET /sim/state``: what the worker really holds, so that an index built from its events can be checked."""

from __future__ import annotations

from engine_ext.sim.events import BatchEncoder
from engine_ext.sim.hashing import as_int
from engine_ext.sim.output import BlockTruth
from engine_ext.sim.worker import SimWorker


def state_json(worker: SimWorker) -> dict[str, object]:
    """Blocks with their identity and tiers, and where the event stream stands. Hashes as lower-case hex."""
    metrics = worker.engine.metrics()
    encoder = worker.encoder
    return {
        "incarnation": worker.incarnation,
        "started_at_s": worker.started_at_s,
        "next_seq": worker.publisher.next_seq,
        "block_size_tokens": worker.engine.config.block_size_tokens,
        "running": metrics.running,
        "waiting": metrics.waiting,
        "pulls_served": worker.pulls_served,
        "cached_by_source": metrics.cached_by_source,
        "blocks": [_block(truth, encoder) for truth in worker.engine.held_blocks()],
    }


def _block(truth: BlockTruth, encoder: BatchEncoder) -> dict[str, object]:
    tiers = {"gpu": truth.hbm_copies > 0, "cpu": truth.in_ram, "storage": truth.in_storage}
    published = encoder.hash(truth.block_hash)
    return {
        "block_hash": truth.block_hash.hex(),
        "published_hash": published.hex() if isinstance(published, bytes) else as_int(truth.block_hash),
        "parent": truth.parent.hex() if truth.parent else None,
        "token_ids": truth.token_ids.tolist(),
        "extra_keys": truth.extra_keys,
        "lora_name": truth.lora_name,
        "tiers": [tier for tier, held in tiers.items() if held],
        "gpu_copies": truth.hbm_copies,
    }
