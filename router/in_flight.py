# SPDX-License-Identifier: Apache-2.0
"""How many requests of each tenant are at workers: of this process, and of all that serve."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Protocol


class InFlight(Protocol):
    """Counts by name of the tenant. All operations are O(1), or O(processes)."""

    def add(self, tenant: str, change: int) -> None:
        """An attempt began (1) or ended (-1) here."""

    def here(self, tenant: str) -> int:
        """Of this process."""
        ...

    def everywhere(self, tenant: str) -> int:
        """Of all processes that serve."""
        ...

    def tenants(self) -> Iterable[str]:
        """Those that have any here."""
        ...


class InFlightHere:
    """Where one process serves."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()

    def add(self, tenant: str, change: int) -> None:
        self._counts[tenant] += change

    def here(self, tenant: str) -> int:
        return self._counts[tenant]

    def everywhere(self, tenant: str) -> int:
        return self._counts[tenant]

    def tenants(self) -> Iterable[str]:
        return [name for name, count in self._counts.items() if count]
