# SPDX-License-Identifier: Apache-2.0
"""What one simulated engine is: model, block size, capacity of its tiers, dialect of its events."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

from engine_ext.sim.errors import SimConfigError
from engine_ext.sim.hashing import DEFAULT_SEED
from engine_ext.sim.text import LETTERS

_AT_LEAST = {
    "block_size_tokens": 1,
    "hbm_blocks": 2,
    "ram_blocks": 0,
    "storage_blocks": 0,
    "max_model_len": 2,
    "max_num_seqs": 1,
    "max_num_batched_tokens": 1,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class SimConfig:
    """One engine. Capacities are in blocks; 0 switches a lower tier off."""

    block_size_tokens: int = 16
    hbm_blocks: int = 8192
    """As ``--num-gpu-blocks-override``: one of them is the null block."""
    ram_blocks: int = 0
    storage_blocks: int = 0
    """Bound of the engine's own storage tier; an engine given a shared store ignores it."""
    max_model_len: int = 131072
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 8192
    offload_prompt_only: bool = True
    """vLLM's default: generated blocks are not offloaded."""
    self_describing_events: bool = False
    """Offload-tier stores carry tokens and parent; they never carry extra keys."""
    storage_locality: str | None = None
    hash_seed: str = DEFAULT_SEED
    extension: bool = False
    """Our engine extension runs: pulls are read from the key ``pointsman`` (``engine_ext.vllm.plan``)."""
    p2p_address: tuple[str, int] | None = None
    """Own address, to recognise a request that names its own worker as source."""
    output_vocabulary: Sequence[int] = LETTERS
    track_identity: bool = True
    """Remember what each held block stands for; a replay of millions of blocks can do without."""

    def __post_init__(self) -> None:
        for field in fields(self):
            least = _AT_LEAST.get(field.name)
            value = getattr(self, field.name)
            if least is not None and value < least:
                raise SimConfigError(field.name, value, f"an integer of at least {least}")
        if self.self_describing_events and not self.track_identity:
            raise SimConfigError("track_identity", False, "true where self_describing_events is on")
        if not self.output_vocabulary:
            raise SimConfigError("output_vocabulary", self.output_vocabulary, "at least one token id")

    @property
    def offloads(self) -> bool:
        """Whether there is a tier below HBM."""
        return self.ram_blocks > 0
