# SPDX-License-Identifier: Apache-2.0
"""The entry point that vLLM calls in each of its processes (group `vllm.general_plugins`).

It gives vLLM's factories our names, so that configurations need no module paths. It runs in engines that do not use
us as well: it imports nothing but the factories, and where something is not as expected it says so once and leaves
everything as it is. An operator who does configure us then gets the reason from the spec itself.
"""

from __future__ import annotations

import importlib
import logging
from dataclasses import dataclass

from .compat import UnsupportedVllm
from .installed import installed_traits

logger = logging.getLogger("vllm.pointsman.plugin")


@dataclass(frozen=True, slots=True)
class Registration:
    """One name for one of vLLM's factories, which import the class when it is first asked for."""

    factory_module: str
    factory: str
    method: str
    name: str
    module: str


REGISTRATIONS = (
    Registration(
        "vllm.v1.kv_offload.factory",
        "OffloadingSpecFactory",
        "register_spec",
        "PointsmanOffloadingSpec",
        "engine_ext.vllm.spec",
    ),
    Registration(
        "vllm.v1.kv_offload.tiering.factory",
        "SecondaryTierFactory",
        "register_tier",
        "PointsmanTier",
        "engine_ext.vllm.tier",
    ),
    Registration(
        "vllm.v1.kv_offload.tiering.factory",
        "SecondaryTierFactory",
        "register_tier",
        "PointsmanStorageTier",
        "engine_ext.vllm.tier",
    ),
    Registration(
        "vllm.v1.kv_offload.cpu.policies.factory",
        "CachePolicyFactory",
        "register_cache_policy",
        "PointsmanPolicy",
        "engine_ext.vllm.policy",
    ),
)


def register() -> None:
    """Registers our names. May be called any number of times, never raises."""
    try:
        installed_traits()
    except UnsupportedVllm as error:
        logger.warning("Pointsman's names are not registered: %s", error)
        return
    for one in REGISTRATIONS:
        try:
            _register(one)
        except Exception:
            logger.exception("Pointsman's %s is not registered", one.name)


def _register(one: Registration) -> None:
    factory = getattr(importlib.import_module(one.factory_module), one.factory)
    if one.name not in factory._registry:  # noqa: SLF001 - a second registration raises, and nothing else tells
        getattr(factory, one.method)(one.name, one.module, one.name)
