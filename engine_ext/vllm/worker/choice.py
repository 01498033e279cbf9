# SPDX-License-Identifier: Apache-2.0
"""Who copies pages, decided once at start-up from the platform and one setting. Pure.

There is no silent second choice: what was asked for is there, or the engine does not start and says why.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

PROMOTION_KEY = "promotion"
"""In `kv_connector_extra_config`: `gpu_ops` (default) or `vllm`."""


class Copier(Enum):
    """Who moves the bytes."""

    GPU = "gpu_ops on CUDA streams"
    HOST = "gpu_ops as memory moves"
    VLLM = "vLLM's own worker"


class PromotionRefused(RuntimeError):
    """The engine cannot start with this platform and this setting; the message names both."""


@dataclass(frozen=True, slots=True)
class Platform:
    """What vLLM says of the platform it runs on."""

    name: str
    is_cuda: bool
    """NVIDIA's CUDA; not ROCm, which vLLM counts as "CUDA-alike"."""
    is_cpu: bool
    offloads: bool
    """Whether vLLM's own offloading worker runs there: CUDA, ROCm and XPU."""


def choose_copier(extra_config: Mapping[str, Any], platform: Platform) -> Copier:
    """The copier for this engine.

    Raises:
        PromotionRefused: the setting is unknown, or nothing of ours or of vLLM's runs on this platform.
    """
    wanted = extra_config.get(PROMOTION_KEY, "gpu_ops")
    if wanted not in ("gpu_ops", "vllm"):
        raise PromotionRefused(f"{PROMOTION_KEY} is {wanted!r}; it can be 'gpu_ops' or 'vllm'")
    if wanted == "vllm":
        if not platform.offloads:
            raise PromotionRefused(
                f"{PROMOTION_KEY}: vllm, but vLLM's own copy does not run on {platform.name}; "
                f"leave the setting out there"
            )
        return Copier.VLLM
    if platform.is_cuda:
        return Copier.GPU
    if platform.is_cpu:
        return Copier.HOST
    hint = f"; {PROMOTION_KEY}: vllm uses vLLM's own copy" if platform.offloads else ""
    raise PromotionRefused(f"gpu_ops moves pages on CUDA and on the CPU, not on {platform.name}{hint}")
