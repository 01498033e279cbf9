# SPDX-License-Identifier: Apache-2.0
"""Workers named in the configuration or on the command line."""

from __future__ import annotations

from collections.abc import Iterable

from router.config_addresses import worker_id_of_url
from router.config_fleet import WorkerEntry
from router.fleet.worker import Role, Transfer, WorkerSpec


def spec_of_entry(entry: WorkerEntry) -> WorkerSpec:
    """The worker an entry describes; its URL loses a trailing slash so that paths can be appended."""
    return WorkerSpec(
        id=entry.id or worker_id_of_url(entry.url),
        url=entry.url.rstrip("/"),
        events=entry.events,
        replay=entry.replay,
        p2p=entry.p2p,
        extension=entry.extension,
        ranks=entry.ranks or 1,
        role=Role(entry.role),
        transfer=_transfer(entry),
        chunk_blocks=entry.chunk_blocks,
        fingerprint=entry.fingerprint,
        block_size_tokens=entry.block_size_tokens,
        ranks_given=entry.ranks is not None,
        offloads_given=entry.offloads,
    )


def _transfer(entry: WorkerEntry) -> Transfer | None:
    if entry.transfer is not None:
        return Transfer(entry.transfer)
    return Transfer.P2P if entry.p2p is not None else None


def static_workers(entries: Iterable[WorkerEntry]) -> list[WorkerSpec]:
    """All configured workers, in the order of the configuration."""
    return [spec_of_entry(entry) for entry in entries]
