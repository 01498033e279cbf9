# SPDX-License-Identifier: Apache-2.0
"""What the storage tier can be told in its entry of `secondary_tiers`, with defaults that work."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

import msgspec

Seconds = Annotated[float, msgspec.Meta(gt=0)]
Threads = Annotated[int, msgspec.Meta(ge=1, le=256)]


class StorageConfigError(ValueError):
    """A key of the tier's entry is unknown, missing, or has a value that cannot be used; the message names it."""


class StorageConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Every key besides `type`, `module_path` and `backpressure`, which vLLM reads itself."""

    root_dir: Annotated[str, msgspec.Meta(min_length=1)]
    """A directory that all attached workers see under any path of their own."""
    capacity_bytes: Annotated[int, msgspec.Meta(ge=1)]
    """Of all block files below the root together, whoever wrote them. Attached workers should name the same figure."""
    read_threads: Threads = 4
    write_threads: Threads = 2
    load_deadline_s: Seconds = 5.0
    """From submission. What has not come by then is recomputed by the engine."""
    store_deadline_s: Seconds = 60.0
    """From submission. A block that is not written by then is not stored."""
    lookup_deadline_s: Seconds = 1.0
    """A file system that has not said by then whether a block exists does not have it."""
    trust_s: Annotated[float, msgspec.Meta(ge=0)] = 60.0
    """A file seen so recently is found without asking the file system; if it is gone, its load fails."""
    queued_blocks: Annotated[int, msgspec.Meta(ge=1)] = 8192
    """Blocks that may wait for a thread, loads and stores each; more are refused."""
    half_life_turnovers: Annotated[float, msgspec.Meta(ge=0)] = 0.5
    """Without a use a block is worth half after so many times the capacity was written; 0: after `half_life_s`."""
    half_life_s: Seconds = 86_400.0
    """Upper bound on that time, and the time itself while the pace of writing is not known."""
    block_rebuild_s: Seconds = 0.01
    """What a block costs to compute, where no plan says."""
    fsync: bool = False
    """Off: a file torn by a power failure fails its checksum and is a miss."""
    rescan_interval_s: Seconds = 15.0
    """How often the directory is read again for what other workers wrote and removed."""
    report_keys_per_step: Annotated[int, msgspec.Meta(ge=1, le=100_000)] = 256
    """How many blocks of a full report go into the events of one engine step."""
    report_interval_s: Annotated[float, msgspec.Meta(ge=0)] = 600.0
    """A full report begins so long after the last one ended; 0: only at start and after a reset."""
    retry_s: Seconds = 10.0
    """How long a degraded store is left alone before it is tried again."""
    orphan_s: Seconds = 600.0
    """Unfinished files that nobody has written to for so long are removed."""
    tenant: Annotated[str, msgspec.Meta(max_length=512)] = ""
    """Workers of different tenants share nothing, though they share the root."""
    weights_revision: Annotated[str, msgspec.Meta(max_length=512)] = ""
    """A name for the weights, where the model's name does not tell them apart."""
    enable_kv_events: bool = True
    """Effective only when the engine publishes KV events."""
    locality: Literal["LOCAL", "REMOTE"] | None = None
    """Relative to this engine; requests can ask for it in `kv_load_tiers`."""


def read_config(entry: Mapping[str, Any]) -> StorageConfig:
    """The entry as a configuration.

    Raises:
        StorageConfigError: an unknown or missing key, or a value out of range.
    """
    try:
        return msgspec.convert(dict(entry), StorageConfig)
    except msgspec.ValidationError as error:
        raise StorageConfigError(f"storage tier: {error}") from error
