# SPDX-License-Identifier: Apache-2.0
"""What is measured, in the order in which it matters if time runs out."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from gpu_ops.direction import Direction
from gpu_ops.dispatch import Batch, Measurement, Reach, Tuning, choose

from .machine import Machine
from .report import CONTIGUOUS, KIB, MIB, OURS, VLLM, Row
from .transfers import Shape, Transfer, Work, shard, whole_pages

INDEX_COPY_UP_TO_BYTES = 64 * MIB  # gathering on the CPU takes long and says little above


@dataclass(frozen=True, slots=True)
class Sizes:
    """Totals and grids; small ones for a rehearsal."""

    totals: tuple[int, ...]
    page_bytes: tuple[int, ...]
    shard_totals: tuple[int, ...]
    grid_bytes: tuple[int, ...]
    grid_counts: tuple[int, ...]
    programs: tuple[int, ...]
    programs_total: int
    layers: int
    matrix: int
    matrix_products: int


MEASURED = Sizes(
    totals=tuple(8 * KIB * 2**i for i in range(18)),  # 8 KiB to 1 GiB
    page_bytes=(8 * KIB, 16 * KIB, 32 * KIB, 128 * KIB),
    shard_totals=(MIB, 16 * MIB, 256 * MIB),
    grid_bytes=(256, KIB, 2 * KIB, 4 * KIB, 8 * KIB, 16 * KIB, 24 * KIB, 28 * KIB, 32 * KIB, 64 * KIB),
    grid_counts=(16, 32, 64, 128, 256, 1024, 4096),
    programs=(4, 8, 12, 16, 24, 32, 64),
    programs_total=64 * MIB,
    layers=32,
    matrix=8192,
    matrix_products=40,
)
REHEARSED = Sizes(
    totals=(8 * KIB, 64 * KIB),
    page_bytes=(8 * KIB,),
    shard_totals=(16 * KIB,),
    grid_bytes=(256, 4 * KIB),
    grid_counts=(2, 4),
    programs=(2, 4),
    programs_total=32 * KIB,
    layers=2,
    matrix=16,
    matrix_products=2,
)


class Bench:
    """The memory that all transfers share, and the sections."""

    def __init__(self, machine: Machine, sizes: Sizes, tuning: Tuning) -> None:
        self.machine, self.sizes, self.tuning = machine, sizes, tuning
        whole = max(*sizes.totals, sizes.programs_total, max(sizes.grid_bytes) * max(sizes.grid_counts))
        self.device = machine.device_bytes(whole)
        # A shard's canonical pages hold the other ranks' bytes too.
        self.host = machine.host_bytes(max(whole, 4 * max(sizes.shard_totals)))

    def transfer(self, shape: Shape) -> Transfer:
        return Transfer(self.machine, shape, self.host, self.device, seed=shape.blocks)

    def whole(self, total_bytes: int, page_bytes: int) -> Shape:
        """As many layers as the total has pages, up to a model's."""
        layers = min(self.sizes.layers, total_bytes // page_bytes)
        return whole_pages(layers, total_bytes // page_bytes // layers, page_bytes)

    def row(self, section: str, shape: Shape, direction: Direction, *, plain: bool = False) -> Row:
        """One shape by every contender."""
        one = self.transfer(shape)
        works: dict[str, Work | None] = {
            CONTIGUOUS: one.contiguous(direction),
            OURS: one.ours(direction, self.tuning),
            VLLM: one.vllm(direction),
            "kernel": one.kernel(direction, self.tuning.programs),
            "driver": one.driver(direction),
            "index_copy": one.index_copy() if plain and shape.total_bytes <= INDEX_COPY_UP_TO_BYTES else None,
        }
        seconds = {name: self.machine.seconds(work) for name, work in works.items() if work is not None}
        batch = Batch(direction, shape.descriptors, shape.total_bytes)
        route = choose(self.tuning, batch, Reach(device_is_cpu=False, kernel_reaches_host=True))
        fragment = shape.total_bytes // shape.descriptors
        return Row(section, shape.total_bytes, fragment, shape.descriptors, seconds, {"route": route.value})

    def promotion(self) -> Iterator[Row]:
        for page_bytes in self.sizes.page_bytes:
            for total in self.sizes.totals:
                if total >= page_bytes:
                    yield self.row("promotion", self.whole(total, page_bytes), Direction.PROMOTE, plain=True)

    def demotion(self) -> Iterator[Row]:
        for page_bytes in self.sizes.page_bytes:
            for total in self.sizes.totals[::3]:
                if total >= page_bytes:
                    yield self.row("demotion", self.whole(total, page_bytes), Direction.DEMOTE)

    def shards(self) -> Iterator[Row]:
        """Tensor-parallel conversion: token-major fragments of one rank of four."""
        for fragment in (256, 1024):
            for total in self.sizes.shard_totals:
                layers = min(self.sizes.layers, total // (16 * fragment))
                shape = shard(layers, total // (layers * 16 * fragment), fragment, 16, ranks=4)
                for direction in Direction:
                    yield self.row(f"shards, {direction.value}", shape, direction)

    def programs(self) -> Iterator[Row]:
        """How many SMs the kernel needs."""
        total = self.sizes.programs_total
        for page_bytes in (2 * KIB, 16 * KIB):
            one = self.transfer(self.whole(total, page_bytes))
            seconds = {CONTIGUOUS: self.machine.seconds(one.contiguous(Direction.PROMOTE))}
            for programs in self.sizes.programs:
                seconds[f"{programs} SMs"] = self.machine.seconds(one.kernel(Direction.PROMOTE, programs))
            yield Row("launch width", total, page_bytes, one.shape.descriptors, seconds)

    def crossovers(self, direction: Direction) -> Iterator[tuple[Row, Measurement]]:
        """Kernel and driver on flat descriptors, over sizes and counts."""
        for bytes_each in self.sizes.grid_bytes:
            for count in self.sizes.grid_counts:
                one = self.transfer(whole_pages(1, count, bytes_each))
                seconds = {
                    "kernel": self.machine.seconds(one.kernel(direction, self.tuning.programs)),
                    "flat kernel": self.machine.seconds(
                        one.descriptor_kernel(direction, self.tuning.programs)
                    ),
                    "driver": self.machine.seconds(one.driver(direction)),
                }
                row = Row(f"crossover, {direction.value}", count * bytes_each, bytes_each, count, seconds)
                yield row, Measurement(bytes_each, count, seconds["kernel"], seconds["driver"])

    def interference(self) -> Iterator[str]:
        """What a promotion beside it does to a matrix product."""
        size, device = self.sizes.matrix, self.machine.device
        left, right = (torch.randn(size, size, device=device).to(torch.bfloat16) for _ in range(2))

        def products() -> None:
            for _ in range(self.sizes.matrix_products):
                torch.matmul(left, right)

        alone = self.machine.seconds(products)
        yield f"{self.sizes.matrix_products} products of {size} x {size} bfloat16: {alone * 1e3:.1f} ms alone"
        shape = self.whole(self.sizes.totals[-1], self.sizes.page_bytes[0])
        one = self.transfer(shape)
        for name, work in (
            ("kernel", one.kernel(Direction.PROMOTE, self.tuning.programs)),
            ("driver", one.driver(Direction.PROMOTE)),
            ("vllm", one.vllm(Direction.PROMOTE)),
        ):
            if work is not None:
                beside = self.machine.seconds_beside(products, work)
                yield f"beside the {name}: {beside * 1e3:.1f} ms, {(beside / alone - 1) * 100:+.1f} %"
