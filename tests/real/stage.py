# SPDX-License-Identifier: Apache-2.0
"""The workers that are up now: one set at a time on the whole machine, kept for the next test that asks for the same."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shlex
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO

from .engine import EngineFailedError, RealWorker
from .launch import MODEL_NAME, Ports, WorkerConfig, command, environment

TURN_TIMEOUT_S = 900.0
"""How long to wait for another test run on this machine to give up the engines."""


class Stage:
    """The workers that are up now. Memory allows one set at a time, on the whole machine."""

    def __init__(self, home: Path) -> None:
        self.home = home
        """What setup.sh filled."""
        self._workers: list[RealWorker] = []
        self._turn: IO[str] | None = None

    def get(self, *configs: WorkerConfig) -> tuple[RealWorker, ...]:
        """Running workers of these configurations, in this order, with caches as the last test left them."""
        fit = [w.config for w in self._workers] == list(configs) and all(w.alive for w in self._workers)
        if not fit:
            self.clear()
            self._take_turn()
            self._start(configs)
        return tuple(self._workers)

    def clear(self) -> None:
        for worker in self._workers:
            worker.stop()
        self._workers = []
        if self._turn is not None:
            self._turn.close()
            self._turn = None

    def _start(self, configs: Sequence[WorkerConfig]) -> None:
        logs = self.home / "logs"
        for letter, config in zip("abcdefgh", configs, strict=False):
            log = logs / f"{os.getpid()}-{letter}.log"
            self._workers.append(RealWorker(letter, config, Ports.free(), self.home, log))
        try:
            for worker in self._workers:
                worker.launch()
            for worker in self._workers:
                worker.wait_ready()
        except BaseException:
            self.clear()
            raise

    def _take_turn(self) -> None:
        self._turn = (self.home / "engines.lock").open("w")
        deadline = time.monotonic() + TURN_TIMEOUT_S
        while True:
            try:
                fcntl.flock(self._turn, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise EngineFailedError("another test run holds the engines of this machine") from None
                time.sleep(0.5)
            else:
                return


@contextlib.contextmanager
def stage(home: Path) -> Iterator[Stage]:
    """A Stage that leaves nothing running; the logs of a run that ended well are removed."""
    one = Stage(home)
    try:
        yield one
    finally:
        one.clear()


def serve_by_hand(config: WorkerConfig, home: Path) -> str:
    """The shell command that starts such a worker outside pytest, for a look by hand."""
    ports = Ports.free()
    changed = {k: v for k, v in environment(config, ports, home).items() if os.environ.get(k) != v}
    words = command(config, ports, home, f"kv@a@{MODEL_NAME}")
    return shlex.join(["env", *(f"{k}={v}" for k, v in changed.items()), *words])


def remove_logs(home: Path) -> None:
    for log in (home / "logs").glob(f"{os.getpid()}-*.log"):
        log.unlink()
    with contextlib.suppress(OSError):
        (home / "logs").rmdir()
