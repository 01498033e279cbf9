# SPDX-License-Identifier: Apache-2.0
"""The last decisions, in memory, bounded. Newest first when read."""

from __future__ import annotations

from collections import OrderedDict

from router.decisions.record import DecisionRecord
from router.errors import NotFoundError


class DecisionLog:
    """A ring of records. A request's attempts are kept together under its id.

    Writing is O(1); a filtered read is O(records kept).
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._by_id: OrderedDict[str, list[DecisionRecord]] = OrderedDict()
        self.dropped = 0
        """Requests pushed out by newer ones."""

    @property
    def capacity(self) -> int:
        """Requests that are kept."""
        return self._capacity

    def __len__(self) -> int:
        return len(self._by_id)

    def add(self, record: DecisionRecord) -> None:
        """Keep a record; the oldest request goes when the log is full."""
        # A first attempt begins anew: ids may come from clients, who may use one again.
        attempts = [] if record.attempt == 1 else self._by_id.get(record.id, [])
        self._by_id[record.id] = [*attempts, record]
        self._by_id.move_to_end(record.id)
        if len(self._by_id) > self._capacity:
            self._by_id.popitem(last=False)
            self.dropped += 1

    def get(self, request_id: str) -> list[DecisionRecord]:
        """All attempts of a request, in order.

        Raises:
            NotFoundError: it is not in the log (any more).
        """
        try:
            return self._by_id[request_id]
        except KeyError:
            raise NotFoundError(f"no decision {request_id}") from None

    def find(self, request_id: str, attempt: int) -> DecisionRecord | None:
        """One attempt of a request, while it is kept."""
        for record in self._by_id.get(request_id, ()):
            if record.attempt == attempt:
                return record
        return None

    def select(
        self,
        limit: int,
        model: str | None = None,
        worker: str | None = None,
        path: str | None = None,
    ) -> list[DecisionRecord]:
        """The newest records that fit every given filter."""
        found: list[DecisionRecord] = []
        for attempts in reversed(self._by_id.values()):
            for record in reversed(attempts):
                fits = (
                    (model is None or record.model == model)
                    and (worker is None or record.worker == worker)
                    and (path is None or path in record.path_blocks)
                )
                if fits:
                    found.append(record)
                if len(found) == limit:
                    return found
        return found
