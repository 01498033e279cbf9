# SPDX-License-Identifier: Apache-2.0
"""What differs between the vLLM versions that this extension runs in. Pure: a table, and how to find a row.

vLLM marks all the hooks used here experimental, so a version is supported once it is in the table, that is, once the
tests against the real engine ran on it. Every row was read in that version's own source; each field names its file
under `vllm/v1/kv_offload/`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

ALLOW_UNKNOWN_KEY = "pointsman_allow_unknown_vllm"
"""In `kv_connector_extra_config`: true to run in a version that is not in the table, as if it were the newest there."""
ALLOW_UNKNOWN_VARIABLE = "POINTSMAN_ALLOW_UNKNOWN_VLLM"
"""The same as an environment variable, `1`, for what loads before the configuration is known."""


@dataclass(frozen=True, slots=True)
class Traits:
    """One version. Booleans say what the newer versions added."""

    version: str
    """Major and minor, e.g. "0.32"; patch releases share a row."""
    policy_insert_takes_request: bool
    """`CachePolicy.insert(key, chunk, req_context)` instead of `(key, chunk)` (`cpu/policies/base.py`)."""
    policy_sees_request_access: bool
    """`CachePolicy.on_request_access(keys, req_context)` is called (`cpu/policies/base.py`, `cpu/manager.py`)."""
    manager_has_lock: bool
    """Callers hold `OffloadingManager.lock`; tiers that set `tolerates_off_thread_polling` are also served from a
    thread between steps, every `tier_poll_interval_s` (`base.py`, `tiering/base.py`, `tiering/manager.py`)."""
    failed_store_emits_removal: bool
    """A failed store adds a removal event with `metadata_only` set (`base.py`, `cpu/manager.py`)."""
    promotions_wait_for_reset: bool
    """After `reset_cache` lookups miss below the host tier until `on_reset_flushed` (`tiering/manager.py`)."""
    config_info: bool
    """Managers and tiers publish `vllm:kv_offload_config_info`; the primary tier takes `info` (`base.py`, `cpu/common.py`)."""
    expedited_loads: bool
    """`OffloadingWorker.submit_load(..., expedited)` may be waited for within its step (`base.py`)."""
    pins_own_slots: bool
    """`pin_mmap_region(region, worker_slot_only)` instead of `(region)` (`cpu/gpu_worker.py`)."""


SUPPORTED: tuple[Traits, ...] = (
    Traits(
        version="0.32",
        policy_insert_takes_request=False,
        policy_sees_request_access=False,
        manager_has_lock=False,
        failed_store_emits_removal=False,
        promotions_wait_for_reset=False,
        config_info=False,
        expedited_loads=False,
        pins_own_slots=False,
    ),
    Traits(
        version="0.33",
        policy_insert_takes_request=True,
        policy_sees_request_access=True,
        manager_has_lock=True,
        failed_store_emits_removal=True,
        promotions_wait_for_reset=True,
        config_info=True,
        expedited_loads=True,
        pins_own_slots=True,
    ),
)
"""Oldest first."""


class UnsupportedVllm(RuntimeError):
    """The vLLM in this process is not in the table."""


def traits_of(version: str, *, allow_unknown: bool = False) -> Traits:
    """The row of a full version string such as `0.32.0+cpu`; builds and patch releases are ignored.

    Raises:
        UnsupportedVllm: there is none, and `allow_unknown` is false.
    """
    found = re.match(r"(\d+\.\d+)(?:[.+]|$)", version)
    for row in SUPPORTED:
        if found and found[1] == row.version:
            return row
    if allow_unknown:
        return SUPPORTED[-1]
    known = ", ".join(row.version for row in SUPPORTED)
    raise UnsupportedVllm(
        f"vLLM {version} is not supported by this version of Pointsman, which knows {known}; "
        f"{ALLOW_UNKNOWN_KEY}: true in kv_connector_extra_config (or {ALLOW_UNKNOWN_VARIABLE}=1) "
        f"runs it as if it were {SUPPORTED[-1].version}, untested"
    )


def unknown_is_allowed(extra_config: Mapping[str, Any], environment: Mapping[str, str]) -> bool:
    """What the operator said, in the configuration or in the environment."""
    return extra_config.get(ALLOW_UNKNOWN_KEY) is True or environment.get(ALLOW_UNKNOWN_VARIABLE) == "1"
