# SPDX-License-Identifier: Apache-2.0
"""Requests in flight by tenant, in a file that all serving processes map.

A table of 64-bit numbers, a row per process and a column per tenant; the tenants are those of the configuration, which
all processes have alike. Each process writes its own row only, each number by one aligned store, and whoever asks adds
the column up: no lock, and a dead process's row is cleared by whoever finds it dead. Two processes that look at the
same moment may both let a request pass, so a limit may be exceeded by as many requests as there are other processes.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterable, Sequence
from pathlib import Path

from router.config_tenants import ANONYMOUS_NAME, TenantsConfig

_BYTES = 8


def tenant_names(config: TenantsConfig) -> list[str]:
    """The tenants of a configuration, in the order that every process has them."""
    return sorted({ANONYMOUS_NAME, *(entry.name for entry in config.entries)})


class TenantTable:
    """The file as the supervisor holds it."""

    def __init__(self, path: Path, tenants: int, processes: int) -> None:
        """Make it, all zeros.

        Raises:
            OSError: it cannot be made.
        """
        size = processes * tenants * _BYTES
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            os.posix_fallocate(fd, 0, size)
            self._map = mmap.mmap(fd, size)
        finally:
            os.close(fd)
        self._row_bytes = tenants * _BYTES

    def clear(self, process: int) -> None:
        """The process is dead: it has nothing in flight."""
        start = process * self._row_bytes
        self._map[start : start + self._row_bytes] = bytes(self._row_bytes)

    def close(self) -> None:
        self._map.close()


class TenantCounts:
    """Implements ``router.in_flight.InFlight`` in one of the processes."""

    def __init__(self, path: Path, tenants: Sequence[str], process: int) -> None:
        """``tenants`` in the order that all processes have.

        Raises:
            OSError: the file cannot be opened.
        """
        with path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), 0)
        self._numbers = memoryview(self._map).cast("q")
        self._width = len(tenants)
        self._columns = {name: column for column, name in enumerate(tenants)}
        self._row = process * self._width

    def add(self, tenant: str, change: int) -> None:
        self._numbers[self._row + self._columns[tenant]] += change

    def here(self, tenant: str) -> int:
        column = self._columns.get(tenant)
        return self._numbers[self._row + column] if column is not None else 0

    def everywhere(self, tenant: str) -> int:
        column = self._columns.get(tenant)
        return sum(self._numbers[column :: self._width]) if column is not None else 0

    def tenants(self) -> Iterable[str]:
        return [name for name in self._columns if self.here(name)]

    def close(self) -> None:
        self._numbers.release()
        self._map.close()
