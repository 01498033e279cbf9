# SPDX-License-Identifier: Apache-2.0
"""Real vLLM workers for tests: started as process groups on free ports, watched, and stopped without leftovers.

A worker is `vllm serve` of the venv that tests/real/setup.sh makes, on the CPU, with the small model beside it.
It takes about 25 s to start and 1.4 GiB of memory, so one `Stage` keeps the workers of the last test up and
replaces them only when a test asks for others (stage.py). Every test therefore brings its own prompts.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import time
import urllib.error
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from .launch import (
    BLOCK_SIZE_TOKENS,
    MODEL_NAME,
    P2P_PORT,
    PEER_PORT,
    Offload,
    Ports,
    WorkerConfig,
    command,
    environment,
    names_port,
)

START_TIMEOUT_S = 240.0
STOP_TIMEOUT_S = 20.0

_SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - where vLLM's processes leave their segments
_SEGMENTS = ("vllm_offload_", "psm_", "sem.mp-")
_PORT_TAKEN = ("Address already in use", "address already in use", "EADDRINUSE")
# Runs a command that ends with its parent: prctl(PR_SET_PDEATHSIG, SIGTERM), then exec.
_LAUNCH = "import ctypes, os, sys; ctypes.CDLL(None).prctl(1, 15); os.execv(sys.argv[1], sys.argv[1:])"


class EngineFailedError(RuntimeError):
    """A worker did not come up; the message ends with the tail of its log."""


@dataclass(slots=True)
class RealWorker:
    """One running vLLM server. Make it with `launch`, then `wait_ready`."""

    name: str
    config: WorkerConfig
    ports: Ports
    home: Path
    log_path: Path
    process: subprocess.Popen[bytes] | None = None
    restarts: int = 0
    _log: IO[bytes] | None = field(default=None, repr=False)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.ports.http}"

    @property
    def events(self) -> str:
        return f"tcp://127.0.0.1:{self.ports.events}"

    @property
    def replay(self) -> str:
        return f"tcp://127.0.0.1:{self.ports.replay}"

    @property
    def p2p(self) -> str | None:
        """`host:port` of the P2P tier's control channel, if the worker has that tier."""
        stock = self.config.offload is not None and self.config.offload.p2p
        extended = self.config.extension is not None and any(
            names_port(tier, P2P_PORT) for tier in self.config.extension.tiers
        )
        return f"127.0.0.1:{self.ports.p2p}" if stock or extended else None

    @property
    def peer(self) -> str | None:
        """`host:port` of our peer tier's control channel, if the worker has that tier."""
        extension = self.config.extension
        has_tier = extension is not None and any(names_port(tier, PEER_PORT) for tier in extension.tiers)
        return f"127.0.0.1:{self.ports.peer}" if has_tier else None

    @property
    def model_dir(self) -> Path:
        return self.home / "model"

    @property
    def topic(self) -> str:
        return f"kv@{self.name}@{MODEL_NAME}"

    @property
    def alive(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def log_tail(self, lines: int = 40) -> str:
        text = self.log_path.read_text(errors="replace") if self.log_path.exists() else ""
        return "\n".join(line[:400] for line in text.splitlines()[-lines:])

    # Life

    def launch(self) -> None:
        """Starts the process and returns at once."""
        if self.process is not None:
            raise RuntimeError(f"{self.name} is already started")
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        self._log = self.log_path.open("wb")
        self.process = subprocess.Popen(
            [
                str(self.home / "venv/bin/python"),
                "-c",
                _LAUNCH,
                *command(self.config, self.ports, self.home, self.topic),
            ],
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=subprocess.STDOUT,
            env=environment(self.config, self.ports, self.home),
            start_new_session=True,
        )

    def wait_ready(self, timeout_s: float = START_TIMEOUT_S) -> None:
        """Returns when /health answers; restarts on fresh ports when one of them was taken meanwhile.

        Raises EngineFailedError when the process dies or the time is over.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            if not self.alive:
                self._after_death()
                if self.restarts < 3 and any(sign in self.log_tail(400) for sign in _PORT_TAKEN):
                    self.restarts += 1
                    self.ports = Ports.free()
                    self.launch()
                    continue
                raise EngineFailedError(f"{self.name} died while starting\n{self.log_tail()}")
            if self._healthy():
                return
            if time.monotonic() > deadline:
                tail = self.log_tail()
                self.kill()
                raise EngineFailedError(f"{self.name} did not answer /health in {timeout_s:g} s\n{tail}")
            time.sleep(0.2)

    def stop(self) -> None:
        """SIGTERM, then SIGKILL for what is left of the group; its shared memory goes too."""
        self._end(signal.SIGTERM)

    def kill(self) -> None:
        """SIGKILL to the whole group, as a crash or the kernel's OOM killer does."""
        self._end(signal.SIGKILL)

    def start_again(self) -> None:
        """A new process at the same address, as after a crash."""
        self.launch()
        self.wait_ready()

    def pause(self) -> None:
        """Freezes every process of the worker; connections stay open and nothing answers."""
        self._signal_group(signal.SIGSTOP)

    def resume(self) -> None:
        self._signal_group(signal.SIGCONT)

    def _healthy(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=5) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False

    def _end(self, first: signal.Signals) -> None:
        if self.process is None:
            return
        segments = self._segments()
        if first is signal.SIGTERM:
            self._signal_group(signal.SIGCONT)
            self.process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(STOP_TIMEOUT_S)
        self._signal_group(signal.SIGKILL)
        self.process.wait()
        deadline = time.monotonic() + 10
        while _group_members(self.process.pid) and time.monotonic() < deadline:
            time.sleep(0.02)
        self._after_death()
        for segment in segments:
            segment.unlink(missing_ok=True)

    def _after_death(self) -> None:
        if self._log is not None:
            self._log.close()
        self.process = self._log = None

    def _signal_group(self, number: signal.Signals) -> None:
        if self.process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, number)

    def _segments(self) -> set[Path]:
        """Shared-memory files that this worker's processes map: only those are ours to remove.

        By inode, because the C library creates a semaphore under another name and links it.
        """
        inodes = set()
        for pid in _group_members(self.process.pid) if self.process else []:
            with contextlib.suppress(OSError):
                for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
                    fields = line.split(maxsplit=5)
                    if len(fields) == 6 and fields[5].startswith(f"{_SHARED_MEMORY}/"):
                        inodes.add(int(fields[4]))
        found = set()
        for path in _SHARED_MEMORY.iterdir():
            with contextlib.suppress(OSError):
                if path.name.startswith(_SEGMENTS) and path.stat().st_ino in inodes:
                    found.add(path)
        return found

    # Requests

    def get(self, path: str, timeout_s: float = 30) -> Any:
        """The decoded JSON answer of a GET."""
        with urllib.request.urlopen(self.url + path, timeout=timeout_s) as answer:
            return json.load(answer)

    def post(self, path: str, body: dict[str, Any] | None = None, timeout_s: float = 120) -> Any:
        """The decoded JSON answer of a POST (None if it is empty). HTTP errors raise urllib's HTTPError."""
        data = json.dumps(body or {}).encode()
        request = urllib.request.Request(self.url + path, data, {"content-type": "application/json"})
        with urllib.request.urlopen(request, timeout=timeout_s) as answer:
            text = answer.read()
        return json.loads(text) if text.strip() else None

    def command(self, path: str, body: dict[str, Any], timeout_s: float = 120) -> str:
        """The plain text that answers a POST. HTTP errors raise urllib's HTTPError."""
        data = json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, {"content-type": "application/json"})
        with urllib.request.urlopen(request, timeout=timeout_s) as answer:
            return str(answer.read().decode())

    def post_stream(self, path: str, body: dict[str, Any], timeout_s: float = 120) -> list[str]:
        """The `data:` fields of a server-sent event stream, read to its end."""
        data = json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, {"content-type": "application/json"})
        with urllib.request.urlopen(request, timeout=timeout_s) as answer:
            lines = answer.read().decode().splitlines()
        return [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]

    def metrics(self) -> dict[str, float]:
        """Every sample of /metrics under its full name; labels as the engine prints them."""
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=30) as answer:
            lines = answer.read().decode().splitlines()
        rows = (line.rsplit(" ", 1) for line in lines if line and not line.startswith("#"))
        return {name: float(value) for name, value in rows}

    def tokens_by_source(self) -> dict[str, float]:
        """Cached prompt tokens since start by where they were: device, host, disk, p2p."""
        family = "vllm:prompt_tokens_cached_by_source_total{"
        return {
            name.split('source="')[1].split('"')[0]: value
            for name, value in self.metrics().items()
            if name.startswith(family)
        }

    def wait_for_source(self, source: str, at_least: float, timeout_s: float = 60) -> None:
        """Returns once /metrics counts that many cached tokens of a source; it lags the answer by a step."""
        deadline = time.monotonic() + timeout_s
        while (seen := self.tokens_by_source().get(source, 0.0)) < at_least:
            if time.monotonic() > deadline:
                raise TimeoutError(f"{self.name} counts {seen:g} tokens from {source}, not {at_least:g}")
            time.sleep(0.05)


def _group_members(group: int) -> list[int]:
    members = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            after_name = stat.read_text().rpartition(")")[2].split()
            if int(after_name[2]) == group and after_name[0] != "Z":
                members.append(int(stat.parent.name))
    return members


__all__ = ["BLOCK_SIZE_TOKENS", "MODEL_NAME", "EngineFailedError", "Offload", "RealWorker", "WorkerConfig"]
