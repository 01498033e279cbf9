# SPDX-License-Identifier: Apache-2.0
"""What a transfer costs on the CPU before the first byte moves: ours beside vLLM's worker, no GPU needed.

    VENV/bin/python tests/bench/gpu_ops.py      VENV has torch and vLLM (tests/real/setup.sh makes one)

vLLM builds one descriptor per block and layer for every transfer. Our kernel needs the block numbers only; our driver
route builds the same descriptors as vLLM. Smallest and median time of a transfer in microseconds, vLLM's with its
handler's own bookkeeping but without streams. Copies themselves are left out. `python -m gpu_ops.bench` measures those.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[0] = str(ROOT)  # not this folder: a module in it has our package's name
sys.path.append(str(ROOT / "tests/gpu/kernels/vllm"))

import torch  # noqa: E402
import worker  # noqa: E402
from vllm.v1.kv_offload.base import GPULoadStoreSpec  # noqa: E402
from vllm.v1.kv_offload.cpu import gpu_worker  # noqa: E402
from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec  # noqa: E402

from gpu_ops.benchmark.machine import Rehearsal  # noqa: E402
from gpu_ops.benchmark.transfers import Shape, Transfer, shard, whole_pages  # noqa: E402
from gpu_ops.descriptors import fragment_tables, unroll  # noqa: E402
from gpu_ops.direction import Direction  # noqa: E402
from gpu_ops.mover import PageMover  # noqa: E402
from gpu_ops.moves import Moves, check_moves  # noqa: E402

SECONDS = 1.0
CASES: dict[str, Shape] = {
    "1 layer, 1 block": whole_pages(1, 1, 8192),
    "32 layers, 16 blocks": whole_pages(32, 16, 8192),
    "64 layers, 512 blocks": whole_pages(64, 512, 8192),
    "64 layers, 512 blocks, shards of 16 fragments": shard(64, 512, 256, 16, ranks=4),
}


def nothing(*_: object, **__: object) -> None:
    """Stands in for the copy."""


def timed(work: Callable[[], object]) -> str:
    work()
    taken_us: list[float] = []
    while sum(taken_us) < SECONDS * 1e6:
        started = time.perf_counter()
        work()
        taken_us.append((time.perf_counter() - started) * 1e6)
    return f"{min(taken_us):8.0f} ({statistics.median(taken_us):.0f})"


def by_vllm(one: Transfer) -> Callable[[], object]:
    handler = worker.handler(
        one.plan, [one.refs], Direction.PROMOTE, nothing, canonical_layout=one.shape.canonical_layout
    )
    chunks, blocks = one.chunks.tolist(), one.blocks.tolist()
    source, target = CPULoadStoreSpec(chunks), GPULoadStoreSpec(blocks, [len(blocks)], [0])

    def work() -> None:
        handler.transfer_async(1, source, target)
        last = handler._transfers.pop()
        handler._stream_pool.append(last.stream)
        handler._event_pool += [last.start_event, last.end_event]
        handler._buffer_pool.append((last.batch_src, last.batch_dst, last.batch_sizes))

    return work


def measure(name: str, shape: Shape) -> None:
    machine = Rehearsal()
    host = machine.host_bytes(shape.layers * shape.blocks * shape.canonical_page_bytes)
    one = Transfer(machine, shape, host, machine.device_bytes(shape.total_bytes), seed=1)
    mover, tables = PageMover(one.plan), fragment_tables(one.plan)

    def for_the_kernel() -> Moves:
        moves = one.moves()
        check_moves(one.plan, moves)
        mover.batch(moves, Direction.PROMOTE)
        return moves

    def for_the_driver() -> None:
        unroll(one.plan, tables, for_the_kernel(), Direction.PROMOTE)

    cells = [timed(by_vllm(one)), timed(for_the_kernel), timed(for_the_driver)]
    print(f"{name:46} {shape.descriptors:8}  " + "  ".join(f"{cell:>18}" for cell in cells), flush=True)


if __name__ == "__main__":
    gpu_worker.current_platform = worker.NO_PLATFORM
    torch.set_num_threads(1)
    print(
        f"{'us per transfer, smallest (median)':46} {'copies':>8}  {'vLLM':>18}  {'our kernel':>18}  {'our driver':>18}"
    )
    for name, shape in CASES.items():
        measure(name, shape)
