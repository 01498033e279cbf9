# SPDX-License-Identifier: Apache-2.0
"""Single parts from the configuration, with errors that name the field where only its user can judge a value."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from indexer.errors import HashKeyError
from indexer.hashing import HashKey, load_or_make_key
from indexer.holders import HolderTable
from indexer.identity import WorkerId
from indexer.index import IndexLimits
from indexer.room import blocks_that_fit
from indexer.snapshot.making import SnapshotMaker
from indexer.snapshot.recovery import IndexRecovery, RecoveryPlan
from indexer.subscriber import EventSubscriber
from indexer.writer_lock import WriterLockedError
from router.config import Config
from router.costs.kv_bytes import with_model
from router.costs.profile import CostProfile, load_profile, with_overrides
from router.decisions.log_file import LogFile, check_writable
from router.decisions.log_writer import LogWriter
from router.errors import ConfigError


def log_writer(config: Config) -> LogWriter | None:
    settings = config.decisions.log
    if settings.path is None:
        return None
    path = Path(settings.path)
    try:
        check_writable(path)
    except BlockingIOError:
        accepted = "a file that no other process writes"
        raise ConfigError("decisions.log.path", settings.path, accepted) from None
    except OSError as error:
        accepted = f"the path of a file that can be written ({error.strerror})"
        raise ConfigError("decisions.log.path", settings.path, accepted) from error
    return LogWriter(LogFile(path, settings.max_bytes, settings.keep), settings.fsync, time.monotonic)


def profile(config: Config) -> CostProfile:
    """The constants to start from: a profile, the model's own KV bytes, then what is set one by one."""
    costs = config.costs
    profile = load_profile(costs.profile)
    if costs.model_config is not None:
        profile = with_model(profile, costs.model_config, costs.kv_dtype, "costs.model_config")
    elif costs.kv_dtype is not None:
        raise ConfigError("costs.kv_dtype", costs.kv_dtype, "only with costs.model_config")
    return with_overrides(profile, costs.overrides)


def limits(config: Config, directory: Path | None = None) -> IndexLimits:
    """``directory``: where the index lies in a file."""
    return IndexLimits(
        max_blocks=config.index.max_blocks or blocks_that_fit(directory),
        detached_blocks=config.index.max_detached_blocks,
        unidentified_blocks=config.index.max_unidentified_blocks,
    )


def recovery(
    config: Config,
    holders: HolderTable,
    subscriber: EventSubscriber,
    key: HashKey,
    doubted: Callable[[WorkerId], bool],
) -> IndexRecovery:
    """Where the index comes from at start; replicas share a configuration, so the admin token is theirs too.

    ``doubted``: workers that are left out of snapshots.
    """
    index, token = config.index, config.admin.token
    plan = RecoveryPlan(
        peers=index.peers,
        headers={"authorization": f"Bearer {token}"} if token else {},
        path=Path(index.snapshot) if index.snapshot else None,
        interval_s=index.snapshot_interval_s,
    )
    maker = SnapshotMaker(holders, subscriber, key.id, time.time, index.snapshot_max_bytes, doubted)
    return IndexRecovery(maker, plan)


def claim_snapshot(recovery: IndexRecovery, config: Config) -> None:
    try:
        recovery.claim()
    except WriterLockedError as error:
        accepted = f"a file that no other process writes ({error})"
        raise ConfigError("index.snapshot", config.index.snapshot, accepted) from error


def hash_key(config: Config) -> HashKey:
    path = config.index.hash_key_file or ""
    try:
        return load_or_make_key(Path(path))
    except HashKeyError as error:
        raise ConfigError("index.hash_key_file", path, f"a key file ({error})") from error
