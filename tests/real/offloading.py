# SPDX-License-Identifier: Apache-2.0
"""For scripts in the engine's venv: vLLM's configuration of an offloading spec, without an engine.

A script in this directory finds it as `offloading`, in vLLM 0.32 and in 0.33.
"""

from __future__ import annotations

import os
import uuid
from pathlib import Path
from typing import Any

from vllm.v1.kv_offload.config import (
    OffloadingCacheConfig,
    OffloadingConfig,
    OffloadingGroupConfig,
    OffloadingModelConfig,
    OffloadingParallelConfig,
)

EXTRA = {"spec_name": "PointsmanOffloadingSpec", "spec_module_path": "engine_ext.vllm.spec"}
_SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - where vLLM keeps the region


def shared_files(engine_id: str) -> list[str]:
    """What is left of that engine's shared regions."""
    return [one.name for one in _SHARED_MEMORY.iterdir() if engine_id in one.name]


def offloading_config(
    extra_config: dict[str, Any],
    *,
    block_bytes: int = 4096,
    tokens_per_block: int = 16,
    blocks_per_chunk: int = 1,
    groups: int = 1,
    events: bool = True,
    engine_id: str | None = None,
    rank: int = 0,
    world_size: int = 1,
    **more: Any,
) -> OffloadingConfig:
    """The configuration of one rank; `block_bytes` are those of one worker's block. Engine ids are unique."""
    return OffloadingConfig(
        groups=tuple(OffloadingGroupConfig(tokens_per_block, (f"layer{i}",), i) for i in range(groups)),
        worker_kv_bytes_per_block=block_bytes,
        enable_kv_cache_events=events,
        extra_config=extra_config,
        engine_id=engine_id or f"test-{os.getpid()}-{uuid.uuid4().hex[:8]}",
        model=OffloadingModelConfig("model", "bfloat16"),
        cache=OffloadingCacheConfig(tokens_per_block, blocks_per_chunk),
        parallel=OffloadingParallelConfig(rank, world_size, world_size, 1, 1, 1, 0, 1, None, False),
        **more,
    )
