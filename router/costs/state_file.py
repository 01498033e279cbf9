# SPDX-License-Identifier: Apache-2.0
"""What was learnt, kept in a file over restarts of the router.

Written whole to a temporary file beside it and moved over it, so a reader sees the old or the new one, never half.
The file is a JSON object: ``version`` of this layout, ``saved_unix_s``, and ``calibration``. Ages inside count from
``saved_unix_s``, so what was learnt also ages while no router runs. A file that cannot be used is left aside: the
router starts anew, says why, and overwrites it with the first save.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import logging
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from router.costs.calibration import Calibration
from router.costs.calibration_state import CalibrationState

VERSION = 1
SAVE_INTERVAL_S = 30.0
_LARGEST_BYTES = 256 * 2**20

_log = logging.getLogger(__name__)


class Loaded(enum.StrEnum):
    """What became of the file at start."""

    NOT_YET = "not_yet"
    ABSENT = "absent"
    LOADED = "loaded"
    UNREADABLE = "unreadable"
    OTHER_VERSION = "other_version"
    OTHER_PROFILE = "other_profile"  # other constants to start from, or other formulas


class _Document(msgspec.Struct):
    version: int
    saved_unix_s: float
    calibration: msgspec.Raw


class StateFile:
    """Loads once, then saves every ``SAVE_INTERVAL_S`` if something was learnt, and at the end."""

    def __init__(
        self,
        path: Path,
        calibration: Calibration,
        monotonic_s: Callable[[], float],
        unix_s: Callable[[], float],
        interval_s: float = SAVE_INTERVAL_S,
    ) -> None:
        self.path = path
        self.loaded = Loaded.NOT_YET
        self.saves = 0
        self.failures = 0
        self.last_error: str | None = None
        """Why the last save, or the load, failed."""
        self._calibration = calibration
        self._monotonic_s = monotonic_s
        self._unix_s = unix_s
        self._interval_s = interval_s
        self._saved_unix_s: float | None = None
        self._saved_revision = calibration.revision
        self._stopping = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Go on from the file if there is one, and begin to save."""
        await self.load()
        self._task = asyncio.create_task(self._run())

    async def stop(self) -> None:
        """Save what was learnt since the last time."""
        self._stopping.set()
        if self._task is not None:
            await self._task
            self._task = None

    async def load(self) -> None:
        """Read the file; whatever is wrong with it is logged, never raised."""
        try:
            data = await asyncio.to_thread(_read, self.path)
            self.loaded = Loaded.ABSENT if data is None else self._take(data)
        except (OSError, msgspec.DecodeError) as error:
            self.loaded, self.last_error = Loaded.UNREADABLE, str(error)
        if self.loaded not in (Loaded.ABSENT, Loaded.LOADED):
            _log.warning(
                "what was learnt of costs is not used (%s: %s%s); starting anew",
                self.path,
                self.loaded.value,
                f", {self.last_error}" if self.last_error else "",
            )

    async def save(self) -> None:
        """Write the file if anything was learnt since it was written; failures are counted and logged."""
        revision = self._calibration.revision
        if revision == self._saved_revision:
            return
        unix_s = self._unix_s()
        # Values that nobody changes are copied here; encoding and writing them is for another thread.
        state = self._calibration.dump(self._monotonic_s())
        try:
            await asyncio.to_thread(_write, self.path, state, unix_s)
        except OSError as error:
            self.failures += 1
            if self.last_error != str(error):
                _log.warning("what was learnt of costs cannot be kept: %s", error)
            self.last_error = str(error)
            return
        self.saves += 1
        self.last_error = None
        self._saved_unix_s, self._saved_revision = unix_s, revision

    def view(self) -> dict[str, Any]:
        """For the admin API."""
        age_s = None if self._saved_unix_s is None else self._unix_s() - self._saved_unix_s
        return {
            "file": str(self.path),
            "loaded": self.loaded.value,
            "saves": self.saves,
            "failures": self.failures,
            "last_error": self.last_error,
            "saved_age_s": age_s,
        }

    async def _run(self) -> None:
        stopping = False
        while not stopping:
            with contextlib.suppress(TimeoutError):
                stopping = await asyncio.wait_for(self._stopping.wait(), self._interval_s)
            await self.save()

    def _take(self, data: bytes) -> Loaded:
        document = msgspec.json.decode(data, type=_Document)
        if document.version != VERSION:
            return Loaded.OTHER_VERSION
        state = msgspec.json.decode(document.calibration, type=CalibrationState)
        down_s = max(self._unix_s() - document.saved_unix_s, 0.0)
        if not self._calibration.load(state, self._monotonic_s() - down_s):
            return Loaded.OTHER_PROFILE
        self._saved_unix_s, self._saved_revision = document.saved_unix_s, self._calibration.revision
        return Loaded.LOADED


def _read(path: Path) -> bytes | None:
    try:
        with path.open("rb") as file:
            data = file.read(_LARGEST_BYTES + 1)
    except FileNotFoundError:
        return None
    if len(data) > _LARGEST_BYTES:
        raise OSError(f"{path} has more than {_LARGEST_BYTES} bytes")
    return data


def _write(path: Path, state: CalibrationState, unix_s: float) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    document = _Document(VERSION, unix_s, msgspec.Raw(msgspec.json.encode(state)))
    with tempfile.NamedTemporaryFile("wb", dir=path.parent, prefix=f".{path.name}.", delete=False) as file:
        temporary = Path(file.name)
        try:
            file.write(msgspec.json.encode(document))
            file.flush()
            os.fsync(file.fileno())
            temporary.replace(path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
