# SPDX-License-Identifier: Apache-2.0
"""``POST /query`` in its plain form, answered by one native call.

``native/plain_query.hpp`` says what is plain. The answer is that of ``calls.py``, byte for byte; what is not plain, or
would be refused, is left to it.
"""

from __future__ import annotations

from indexer import _core
from indexer.holders import HolderTable
from indexer.service.registry import Group, Registry


class QuickQueries:
    """Keeps the native core's copy of whose slot is whose. Used by one thread, that of the event loop.

    Raises:
        TypeError: the index is not that of the native core.
    """

    def __init__(self, registry: Registry, holders: HolderTable) -> None:
        if not isinstance(holders.index, _core.PrefixIndex):
            raise TypeError("plain queries are answered by the native index")
        self._registry = registry
        self._holders = holders
        self._desk = _core.QueryDesk(holders.index)
        self._revision = -1

    def request(self, received: bytes) -> bytes | int | None:
        """A whole HTTP answer of 200 to a whole HTTP request; None: ask the general path. O(bytes + blocks).

        An integer is how many bytes the request has, of which some are missing (0: its head is not complete).
        """
        if self._holders.revision != self._revision:
            self._refresh()
        return self._desk.request(received)

    def _refresh(self) -> None:
        """O(registrations), after a change of slots."""
        revision = self._holders.revision
        self._desk.clear()
        for group in self._registry.groups():
            self._put(group)
        self._revision = revision

    def _put(self, group: Group) -> None:
        instances: dict[str, int] = {}
        registrations: dict[str, int] = {}
        rows: dict[tuple[str, int], int] = {}
        places = [
            (
                slot,
                instances.setdefault(place.instance, len(instances)),
                registrations.setdefault(place.registration, len(registrations)),
                rows.setdefault((place.registration, place.dp_rank), len(rows)),
                place.is_store,
            )
            for slot, place in self._registry.places(group).items()
        ]
        ranks = [rank for _, rank in rows]
        adapters = sorted({one.lora for one in group.registrations.values() if one.lora})
        self._desk.put(
            group.key.model, group.key.tenant, group.block_size, list(instances), ranks, adapters, places
        )
