# SPDX-License-Identifier: Apache-2.0
"""What a new process takes from another indexer: the registrations of the first that answers.

What they hold comes from the peer's snapshot, if it has one (``indexer.snapshot.peers``), and else from the engines
themselves: each stream starts with a replay, and a rank whose history does not reach back far enough is marked
partial. ``/workers`` is used, which other indexers answer too.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import aiohttp
import msgspec
from msgspec import Struct

from indexer.service.requests import DEFAULT_TENANT, Register

log = logging.getLogger(__name__)

_TIMEOUT_S = 5.0


class _Listener(Struct):
    endpoint: str
    replay_endpoint: str | None = None
    lora_name: str | None = None


class _Row(Struct):
    instance_id: int
    model_name: str
    block_size: int
    listeners: dict[int, _Listener]
    tenant_id: str | None = None
    routing_group: str | None = None


async def registrations_of_peers(urls: Sequence[str]) -> list[Register]:
    """Registrations as the first peer that answers tells them; empty where none does, which is logged."""
    timeout = aiohttp.ClientTimeout(total=_TIMEOUT_S)
    for url in urls:
        try:
            async with (
                aiohttp.ClientSession(timeout=timeout) as session,
                session.get(url.rstrip("/") + "/workers") as got,
            ):
                got.raise_for_status()
                found = registrations(await got.read())
        except (aiohttp.ClientError, TimeoutError, msgspec.DecodeError) as error:
            log.warning("peer %s: %s", url, error or type(error).__name__)
            continue
        log.info("%d registrations from peer %s", len(found), url)
        return found
    return []


def registrations(body: bytes) -> list[Register]:
    """The rows of ``/workers`` as requests to register.

    Raises:
        msgspec.DecodeError: these are no such rows, or a value in one is none that could be registered.
    """
    return [
        msgspec.convert(
            {
                "instance_id": row.instance_id,
                "endpoint": listener.endpoint,
                "model_name": row.model_name,
                "tenant_id": row.tenant_id or row.routing_group or DEFAULT_TENANT,
                "block_size": row.block_size,
                "dp_rank": rank,
                "replay_endpoint": listener.replay_endpoint,
                "lora_name": listener.lora_name,
            },
            Register,
        )
        for row in msgspec.json.decode(body, type=list[_Row])
        for rank, listener in row.listeners.items()
    ]
