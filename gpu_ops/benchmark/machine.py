# SPDX-License-Identifier: Apache-2.0
"""Where the benchmark runs: a CUDA device, or the CPU with Triton's interpreter to rehearse on."""

from __future__ import annotations

import ctypes
import platform
import statistics
import time
from collections.abc import Callable
from importlib import metadata
from typing import Protocol

import torch

from gpu_ops.driver import BatchCopy, DriverCopy, copy_on_host

MAX_REPEATS, MIN_REPEATS = 30, 3
SECONDS_PER_TIMING = 0.2


class Machine(Protocol):
    """Memory, a clock and the copy engines of one device."""

    device: torch.device
    batch_copy: BatchCopy

    def host_bytes(self, size_bytes: int) -> torch.Tensor:
        """int8 host memory that the device can read, zeroed so that every page of it exists."""

    def device_bytes(self, size_bytes: int) -> torch.Tensor:
        """int8 device memory."""

    def finish(self) -> None:
        """Waits for everything enqueued."""

    def run(self, work: Callable[[], None]) -> None:
        """Does the work as a timing would, and waits for it."""

    def seconds(self, work: Callable[[], None]) -> float:
        """Median wall time of the work, from the call until it is finished on the device."""

    def seconds_beside(self, work: Callable[[], None], beside: Callable[[], None]) -> float:
        """Median time of the work on a stream of its own while `beside` runs over and over."""

    def describe(self) -> list[str]:
        """Machine, driver and versions, one line each."""


class CudaMachine:
    """The current CUDA device. Work runs on a stream of its own: batched copies are not allowed on the default one."""

    def __init__(self) -> None:
        self.device = torch.device("cuda", torch.cuda.current_device())
        self.batch_copy: BatchCopy = DriverCopy()
        self.stream = torch.cuda.Stream()

    def host_bytes(self, size_bytes: int) -> torch.Tensor:
        return torch.zeros(size_bytes, dtype=torch.int8, pin_memory=True)

    def device_bytes(self, size_bytes: int) -> torch.Tensor:
        return torch.zeros(size_bytes, dtype=torch.int8, device=self.device)

    def finish(self) -> None:
        torch.cuda.synchronize()

    def run(self, work: Callable[[], None]) -> None:
        with torch.cuda.stream(self.stream):
            work()
        self.stream.synchronize()

    def seconds(self, work: Callable[[], None]) -> float:
        torch.cuda.synchronize()
        return median_seconds(lambda: self.run(work))

    def seconds_beside(self, work: Callable[[], None], beside: Callable[[], None]) -> float:
        worker = torch.cuda.Stream()
        taken = []
        for _ in range(MIN_REPEATS):
            torch.cuda.synchronize()
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            with torch.cuda.stream(worker):
                start.record()
                work()
                end.record()
            while not end.query():
                self.run(beside)
            taken.append(float(start.elapsed_time(end)) / 1e3)
        return statistics.median(taken)

    def describe(self) -> list[str]:
        properties = torch.cuda.get_device_properties(self.device)
        version = ctypes.c_int()
        ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
        gpu = f"{properties.name}, {properties.multi_processor_count} SMs"
        cuda = f"CUDA {version.value // 1000}.{version.value % 1000 // 10}, torch's {torch.version.cuda}"
        batched = "yes" if getattr(self.batch_copy, "is_batched", False) else "no"
        capability = f"{properties.major}.{properties.minor}"
        return [
            f"GPU: {gpu}, capability {capability}",
            f"driver: {cuda}, batched copy {batched}",
            *software(),
        ]


class Rehearsal:
    """The CPU: everything but CUDA itself runs, at sizes that the interpreter can bear. Its figures mean nothing."""

    def __init__(self) -> None:
        self.device = torch.device("cpu")
        self.batch_copy: BatchCopy = copy_on_host

    def host_bytes(self, size_bytes: int) -> torch.Tensor:
        return torch.zeros(size_bytes, dtype=torch.int8)

    def device_bytes(self, size_bytes: int) -> torch.Tensor:
        return torch.zeros(size_bytes, dtype=torch.int8)

    def finish(self) -> None:
        """Nothing is ever enqueued."""

    def run(self, work: Callable[[], None]) -> None:
        work()

    def seconds(self, work: Callable[[], None]) -> float:
        started = time.perf_counter()
        work()
        return time.perf_counter() - started

    def seconds_beside(self, work: Callable[[], None], beside: Callable[[], None]) -> float:
        beside()
        return self.seconds(work)

    def describe(self) -> list[str]:
        return ["REHEARSAL on the CPU: no figure below is a measurement", *software()]


def median_seconds(work: Callable[[], None]) -> float:
    """Runs the work once to warm up, then until enough time or repeats have passed."""
    work()
    taken: list[float] = []
    while len(taken) < MIN_REPEATS or (len(taken) < MAX_REPEATS and sum(taken) < SECONDS_PER_TIMING):
        started = time.perf_counter()
        work()
        taken.append(time.perf_counter() - started)
    return statistics.median(taken)


def software() -> list[str]:
    versions = []
    for name in ("torch", "triton", "vllm", "pointsman"):
        try:
            versions.append(f"{name} {metadata.version(name)}")
        except metadata.PackageNotFoundError:
            versions.append(f"{name} not installed")
    return [
        f"host: {platform.machine()}, Linux {platform.release()}, Python {platform.python_version()}",
        ", ".join(versions),
    ]
