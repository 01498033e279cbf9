# SPDX-License-Identifier: Apache-2.0
"""Workers from a YAML file that may change: a list of entries as in ``fleet.workers``, or a mapping with ``workers``.

The file is read once a second and its bytes compared, so it does not matter how it is replaced (a new file under the
name, a ConfigMap's links, a write in place). A file that is not right changes nothing until it is.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import yaml

from router.config_fleet import WorkerEntry, check_worker, with_id
from router.config_schema import config_error
from router.config_yaml import load_yaml
from router.errors import ConfigError
from router.fleet.discovery.roster import Roster
from router.fleet.discovery.targets import Target
from router.fleet.fleet import Fleet
from router.fleet.static import static_workers

_log = logging.getLogger(__name__)

_INTERVAL_S = 1.0
_MAX_BYTES = 16 * 2**20


class FileDiscovery:
    """One source of workers. ``start`` and ``stop`` run once each, on the fleet's event loop."""

    name = "file"

    def __init__(
        self,
        path: str,
        fleet: Fleet,
        interval_s: float = _INTERVAL_S,
        check: Callable[[Sequence[WorkerEntry], str], None] | None = None,
    ) -> None:
        """Reads the file: a service does not start with a bad one. ``check`` may refuse entries that others take.

        Raises:
            ConfigError: it cannot be read or an entry is not accepted.
        """
        self._path = Path(path)
        self._interval_s = interval_s
        self._check = check
        self._roster = Roster(fleet)
        self._task: asyncio.Task[None] | None = None
        self._read: bytes | None = None
        self._trouble: str | None = None
        self._lists = self._failures = 0
        self._take(_bytes_of(self._path))

    async def start(self) -> None:
        self._task = asyncio.create_task(self._watch(), name="watch the file of workers")

    async def stop(self) -> None:
        """Read no more; the workers stay as they are."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None

    def synced(self) -> bool:
        """Always: it is read before anything starts."""
        return True

    def priority_of(self, objective: str) -> int | None:
        """A file knows of no objectives."""
        return None

    def objectives(self) -> dict[str, int]:
        """As ``priority_of``."""
        return {}

    def troubles(self) -> list[str]:
        """Why the workers may not be those that should be; empty when all is well."""
        found = [] if self._trouble is None else [self._trouble]
        return found + [f"worker {name} is there twice" for name in self._roster.clashes]

    def counts(self) -> dict[str, int]:
        """``workers``, ``rejected`` (now) and ``lists``, ``failures`` (since the start)."""
        return {
            "workers": len(self._roster),
            "rejected": len(self._roster.clashes),
            "lists": self._lists,
            "failures": self._failures,
        }

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(self._interval_s)
            self._look(await asyncio.to_thread(_try_read, self._path))

    def _look(self, data: bytes | ConfigError) -> None:
        if data == self._read and self._trouble is None:
            return
        try:
            if isinstance(data, ConfigError):
                raise data
            self._take(data)
        except ConfigError as error:
            if self._trouble != str(error):
                self._failures += 1
                _log.warning("the workers stay as they are: %s", error)
            self._trouble = str(error)

    def _take(self, data: bytes) -> None:
        entries = parse_workers(data, str(self._path))
        if self._check is not None:
            self._check(entries, str(self._path))
        self._roster.set(Target(spec) for spec in static_workers(entries))
        self._read, self._trouble = data, None
        self._lists += 1


def parse_workers(data: bytes, path: str) -> list[WorkerEntry]:
    """The entries of a file.

    Raises:
        ConfigError: names the entry and what is wrong with it.
    """
    try:
        document = load_yaml(data.decode("utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        text = str(error).replace("\n", " ")
        raise ConfigError("fleet.file", path, f"a YAML list of workers ({text})") from error
    if isinstance(document, dict) and set(document) == {"workers"}:
        document = document["workers"]
    if document is None:
        document = []
    if not isinstance(document, list):
        raise ConfigError("fleet.file", path, "a YAML list of workers, as in fleet.workers")
    entries: list[WorkerEntry] = []
    seen: set[str | None] = set()
    for position, value in enumerate(document):
        at = f"{path}[{position}]"
        try:
            entry = msgspec.convert(with_id(value), WorkerEntry)
        except msgspec.ValidationError as error:
            raise config_error(error, WorkerEntry, value, at) from error
        check_worker(entry, at)
        if entry.id in seen:
            raise ConfigError(f"{at}.id", entry.id, "each name once")
        seen.add(entry.id)
        entries.append(entry)
    return entries


def _try_read(path: Path) -> bytes | ConfigError:
    try:
        return _bytes_of(path)
    except ConfigError as error:
        return error


def _bytes_of(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            data = file.read(_MAX_BYTES + 1)
    except OSError as error:
        raise ConfigError("fleet.file", str(path), f"a readable file ({error.strerror})") from error
    if len(data) > _MAX_BYTES:
        raise ConfigError("fleet.file", str(path), f"a file of at most {_MAX_BYTES} bytes")
    return data
