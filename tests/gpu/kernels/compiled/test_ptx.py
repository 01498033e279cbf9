# SPDX-License-Identifier: Apache-2.0
"""The kernels compiled ahead of time for Hopper and Blackwell: what instructions move the payload."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from typing import Any

import pytest
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.compiler import compile as compile_ahead

from gpu_ops import kernels
from gpu_ops.launch import NUM_WARPS, TILE_WORDS, TileShape, tile_shape

THREADS = NUM_WARPS * 32
WORDS_PER_THREAD = TILE_WORDS // THREADS
WIDE = {16: "v4.b32", 4: "b32", 1: "b8"}
MOVE_PAGES = {
    "moves": "*i32",
    "sets": "*i32",
    "places": "*i64",
    "shapes": "*i32",
    "num_moves": "i32",
    "tiles_per_move": "i32",
    "pages_per_chunk": "i32",
}
COPY_DESCRIPTORS = {"descriptors": "*i64", "num_descriptors": "i32", "tiles_per_descriptor": "i32"}


@dataclass(frozen=True, slots=True)
class Binary:
    """One compiled kernel."""

    ptx: str
    cubin: bytes
    shared_bytes: int

    @property
    def accesses(self) -> list[tuple[str, str]]:
        """("ld" or "st", width) of every access to global memory, in order."""
        return re.findall(r"\b(ld|st)\.global(?:\.[a-z_]+)*?\.((?:v\d\.)?b\d+)", self.ptx)

    @property
    def stores(self) -> Counter[str]:
        return Counter(width for kind, width in self.accesses if kind == "st")

    @property
    def loads(self) -> Counter[str]:
        return Counter(width for kind, width in self.accesses if kind == "ld")


def build(kernel: Any, arguments: dict[str, str], shape: TileShape, capability: int, **more: Any) -> Binary:
    constants = {"UNIT": shape.unit_bytes, "ITEMS": shape.items, "WORDS": shape.words} | more
    source = ASTSource(
        fn=kernel, signature=arguments | dict.fromkeys(constants, "constexpr"), constexprs=constants
    )
    built = compile_ahead(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": NUM_WARPS})
    return Binary(built.asm["ptx"], built.asm["cubin"], built.metadata.shared)


CAPABILITIES = pytest.mark.parametrize("capability", [90, 100])
# (access width, largest payload): whole tiles, a few pages in a tile, the smallest pieces, odd pages
SHAPES = pytest.mark.parametrize(
    "shape",
    [
        tile_shape(16, 32768),
        tile_shape(16, 4096),
        tile_shape(16, 256),
        tile_shape(4, 2048),
        tile_shape(1, 999),
    ],
)


@CAPABILITIES
@SHAPES
@pytest.mark.parametrize("strided", [False, True])
def test_pages_move_in_the_widest_accesses_that_their_alignment_allows(
    capability: int, shape: TileShape, strided: bool
) -> None:
    for promote in (True, False):
        binary = build(kernels.move_pages, MOVE_PAGES, shape, capability, PROMOTE=promote, STRIDED=strided)
        check(binary, shape.unit_bytes, capability)


@CAPABILITIES
@SHAPES
def test_descriptors_move_in_the_widest_accesses_that_their_alignment_allows(
    capability: int, shape: TileShape
) -> None:
    check(build(kernels.copy_descriptors, COPY_DESCRIPTORS, shape, capability), shape.unit_bytes, capability)


def check(binary: Binary, unit: int, capability: int) -> None:
    assert f".target sm_{capability}" in binary.ptx
    assert binary.cubin[:4] == b"\x7fELF", "the bundled ptxas accepted it"
    # Every store is payload, each thread stores its words with one instruction each, and nothing else is stored.
    assert binary.stores == {WIDE[unit]: WORDS_PER_THREAD}
    assert binary.loads[WIDE[unit]] >= WORDS_PER_THREAD
    if unit == 16:
        assert binary.loads["v4.b32"] == WORDS_PER_THREAD
    # A whole tile is in flight: no load waits behind a store of the same tile.
    kinds = [kind for kind, _ in binary.accesses]
    assert kinds.index("st") == len(kinds) - WORDS_PER_THREAD
    assert set(kinds[-WORDS_PER_THREAD:]) == {"st"}
    # Warps run on their own: no staging, no barrier.
    assert binary.shared_bytes == 0
    assert "bar.sync" not in binary.ptx


@CAPABILITIES
def test_no_thread_spills_its_registers(capability: int) -> None:
    shape = tile_shape(16, 256)
    binary = build(kernels.move_pages, MOVE_PAGES, shape, capability, PROMOTE=False, STRIDED=True)
    assert ".local" not in binary.ptx
