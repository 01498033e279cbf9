# SPDX-License-Identifier: Apache-2.0
"""Kernel or batched driver copy: a pure function of a batch's shape and of measurements kept in a file.

What decides is how many bytes one descriptor copies on average and how many descriptors there are: the driver pays per
copy, the kernel per launch, so the kernel wins where there are many small ones. vLLM 0.32 decides by the largest page
of the worker (`cpu/gpu_worker.py`, _select_swap_blocks_fn), which says nothing about the fragments that a canonical
layout really submits, and lets one large page send every small one to the driver.

A tuning holds, per direction, crossovers with rising `up_to_bytes`. The first one that is not below the batch's mean
applies: the kernel from `from_descriptors` on, else the driver. A mean above the last crossover goes to the driver.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from enum import Enum
from pathlib import Path

from .direction import Direction
from .errors import PlanRefused

DEFAULT_TUNING = Path(__file__).parent / "tunings" / "default.json"


class Route(Enum):
    """Who copies."""

    KERNEL = "kernel"
    DRIVER = "driver"  # the copy engines, by cuMemcpyBatchAsync
    HOST = "host"  # memory moves: the device is the CPU


@dataclass(frozen=True, slots=True)
class Batch:
    """The shape of one transfer."""

    direction: Direction
    descriptors: int
    total_bytes: int

    @property
    def mean_bytes(self) -> float:
        return self.total_bytes / self.descriptors if self.descriptors else 0.0


@dataclass(frozen=True, slots=True)
class Reach:
    """What the memory allows. A kernel reaches host memory only from an NVIDIA GPU, and only if it is pinned."""

    device_is_cpu: bool
    kernel_reaches_host: bool


@dataclass(frozen=True, slots=True)
class Crossover:
    """Up to this many bytes per descriptor, the kernel wins from this many descriptors on."""

    up_to_bytes: int
    from_descriptors: int


@dataclass(frozen=True, slots=True)
class Tuning:
    """Thresholds of one kind of machine; `source` says who measured what, where.

    `programs` bounds the SMs that a launch takes from the model.
    """

    source: str
    programs: int
    promote: tuple[Crossover, ...]
    demote: tuple[Crossover, ...]

    def __post_init__(self) -> None:
        if self.programs < 1:
            raise PlanRefused(f"a launch of {self.programs} programs; at least 1 is needed")
        for crossovers in (self.promote, self.demote):
            sizes = [one.up_to_bytes for one in crossovers]
            if sizes != sorted(set(sizes)) or any(one.from_descriptors < 1 for one in crossovers):
                raise PlanRefused(f"crossovers need rising up_to_bytes and positive counts, not {crossovers}")


def choose(tuning: Tuning, batch: Batch, reach: Reach) -> Route:
    """Who copies this batch. O(crossovers)."""
    if reach.device_is_cpu:
        return Route.HOST
    if not reach.kernel_reaches_host:
        return Route.DRIVER
    crossovers = tuning.promote if batch.direction is Direction.PROMOTE else tuning.demote
    for crossover in crossovers:
        if batch.mean_bytes <= crossover.up_to_bytes:
            return Route.KERNEL if batch.descriptors >= crossover.from_descriptors else Route.DRIVER
    return Route.DRIVER


@dataclass(frozen=True, slots=True)
class Measurement:
    """Seconds that kernel and driver took for `descriptors` copies of `bytes_each`."""

    bytes_each: int
    descriptors: int
    kernel_s: float
    driver_s: float


def crossovers_from(measurements: Iterable[Measurement]) -> tuple[Crossover, ...]:
    """Per measured size, the smallest count from which the kernel is at least as fast at every larger count.

    Sizes where it never is are left out, and so are the larger sizes behind the first such one: there the driver
    stays. Neighbours with one count become one crossover.
    """
    by_size: dict[int, list[Measurement]] = {}
    for one in measurements:
        by_size.setdefault(one.bytes_each, []).append(one)
    found: list[Crossover] = []
    for size in sorted(by_size):
        count = _first_win(sorted(by_size[size], key=lambda one: one.descriptors))
        if count is None:
            break
        if found and found[-1].from_descriptors == count:
            found.pop()
        found.append(Crossover(size, count))
    return tuple(found)


def _first_win(rising: Sequence[Measurement]) -> int | None:
    count = None
    for one in reversed(rising):
        if one.kernel_s > one.driver_s:
            break
        count = one.descriptors
    return count


def load_tuning(path: Path = DEFAULT_TUNING) -> Tuning:
    """Reads a tuning file. Raises PlanRefused where it is not one."""
    try:
        raw = json.loads(path.read_text())
        return Tuning(
            source=str(raw["source"]),
            programs=int(raw["programs"]),
            promote=tuple(Crossover(**row) for row in raw["promote"]),
            demote=tuple(Crossover(**row) for row in raw["demote"]),
        )
    except (json.JSONDecodeError, KeyError, TypeError, ValueError) as error:
        raise PlanRefused(f"{path} is not a tuning: {error}") from error


def dump_tuning(tuning: Tuning) -> str:
    """The text of a tuning file."""
    return json.dumps(asdict(tuning), indent=2) + "\n"
