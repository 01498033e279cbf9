# SPDX-License-Identifier: Apache-2.0
"""The Triton kernels. Written so that one program always has TILE = ITEMS * WORDS words in flight.

Copies between host and GPU are bounded by bytes in flight divided by the round trip, not by arithmetic. A program
therefore never works on one small piece at a time: it takes ITEMS pieces at once, each of up to WORDS words, where
ITEMS * WORDS is fixed (launch.py). All loads of a tile are issued before its first store.

A word is UNIT bytes: 16 (four int32 lanes, one ld.global.v4 and one st.global.v4), or 4, or 1 where addresses or sizes
are not multiples of 16. The launcher picks UNIT from the real addresses; a wrong one faults, it never misplaces bytes.

Programs stride over the pieces, so the launch width (how many SMs are taken from the model) is free.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit  # type: ignore[untyped-decorator]
def _copy_words(
    source: tl.tensor,  # [ITEMS] int64 addresses of the pieces' first fragments
    target: tl.tensor,
    source_stride: tl.tensor,  # [ITEMS] int32 bytes from fragment to fragment
    target_stride: tl.tensor,
    fragment_bytes: tl.tensor,  # [ITEMS] int32
    first_byte: tl.tensor,  # [ITEMS] int32, where in the payload the piece begins
    payload_bytes: tl.tensor,  # [ITEMS] int32, 0 for a lane without a piece
    UNIT: tl.constexpr,  # noqa: N803 - Triton's spelling of compile-time constants
    WORDS: tl.constexpr,  # noqa: N803
    STRIDED: tl.constexpr,  # noqa: N803
) -> None:
    """Copies words [first_byte / UNIT, + WORDS) of each piece, as far as its payload goes."""
    LANES: tl.constexpr = 4 if UNIT == 16 else 1  # noqa: N806
    ELEMENT: tl.constexpr = tl.int8 if UNIT == 1 else tl.int32  # noqa: N806
    word = (first_byte // UNIT)[:, None] + tl.arange(0, WORDS)[None, :]
    inside = word < (payload_bytes // UNIT)[:, None]
    if STRIDED:
        words_per_fragment = (fragment_bytes // UNIT)[:, None]
        fragment = word // words_per_fragment
        within = (word - fragment * words_per_fragment) * UNIT
        source_offset = fragment * source_stride[:, None] + within
        target_offset = fragment * target_stride[:, None] + within
    else:
        source_offset = word * UNIT
        target_offset = word * UNIT
    lane = tl.arange(0, LANES)[None, None, :]
    read = (source[:, None] + source_offset)[:, :, None].to(tl.pointer_type(ELEMENT)) + lane
    write = (target[:, None] + target_offset)[:, :, None].to(tl.pointer_type(ELEMENT)) + lane
    # Addresses that come from memory say nothing about their alignment; without this every lane is its own access.
    read = tl.multiple_of(tl.max_contiguous(read, [1, 1, LANES]), [1, 1, UNIT])
    write = tl.multiple_of(tl.max_contiguous(write, [1, 1, LANES]), [1, 1, UNIT])
    mask = inside[:, :, None]
    tl.store(write, tl.load(read, mask=mask), mask=mask)


@triton.jit(do_not_specialize=["num_moves", "tiles_per_move", "pages_per_chunk"])  # type: ignore[untyped-decorator]
def move_pages(
    moves: tl.tensor,  # int32 (num_moves, 3): host page, device page, set
    sets: tl.tensor,  # int32 (sets, 2): first tile, tiles
    places: tl.tensor,  # int64 (tiles, 4): host_base, host_chunk_stride, device_base, device_page_stride
    shapes: tl.tensor,  # int32 (tiles, 8): host_page_stride, host_stride, device_stride, fragment_bytes, payload_bytes,
    #               first_byte, num_writers, writer_index
    num_moves: tl.tensor,
    tiles_per_move: tl.tensor,  # of the set with the most tiles
    pages_per_chunk: tl.tensor,
    PROMOTE: tl.constexpr,  # noqa: N803
    UNIT: tl.constexpr,  # noqa: N803
    ITEMS: tl.constexpr,  # noqa: N803
    WORDS: tl.constexpr,  # noqa: N803
    STRIDED: tl.constexpr,  # noqa: N803
) -> None:
    """Moves pages by number: every (move, tile of its set) is one piece. Expects num_moves * tiles_per_move < 2^31."""
    pieces = num_moves * tiles_per_move
    for first in range(tl.program_id(0) * ITEMS, pieces, tl.num_programs(0) * ITEMS):
        piece = first + tl.arange(0, ITEMS)
        move = piece // tiles_per_move
        ours = piece < pieces
        host_page = tl.load(moves + move * 3, mask=ours, other=0)
        device_page = tl.load(moves + move * 3 + 1, mask=ours, other=0)
        number = tl.load(moves + move * 3 + 2, mask=ours, other=0)
        tile = piece - move * tiles_per_move
        ours = ours & (tile < tl.load(sets + number * 2 + 1, mask=ours, other=0))
        tile += tl.load(sets + number * 2, mask=ours, other=0)

        place = places + tile * 4
        chunk = host_page // pages_per_chunk
        slot = host_page - chunk * pages_per_chunk
        shape = shapes + tile * 8
        host = tl.load(place, mask=ours, other=0)
        host += chunk.to(tl.int64) * tl.load(place + 1, mask=ours, other=0)
        host += slot.to(tl.int64) * tl.load(shape, mask=ours, other=0)
        device = tl.load(place + 2, mask=ours, other=0)
        device += device_page.to(tl.int64) * tl.load(place + 3, mask=ours, other=0)

        host_stride = tl.load(shape + 1, mask=ours, other=0)
        device_stride = tl.load(shape + 2, mask=ours, other=0)
        fragment_bytes = tl.load(shape + 3, mask=ours, other=UNIT)
        payload_bytes = tl.load(shape + 4, mask=ours, other=0)
        first_byte = tl.load(shape + 5, mask=ours, other=0)
        if PROMOTE:
            _copy_words(
                host,
                device,
                host_stride,
                device_stride,
                fragment_bytes,
                first_byte,
                payload_bytes,
                UNIT,
                WORDS,
                STRIDED,
            )
        else:
            num_writers = tl.load(shape + 6, mask=ours, other=1)
            writer = host_page % num_writers == tl.load(shape + 7, mask=ours, other=0)
            _copy_words(
                device,
                host,
                device_stride,
                host_stride,
                fragment_bytes,
                first_byte,
                tl.where(writer, payload_bytes, 0),
                UNIT,
                WORDS,
                STRIDED,
            )


@triton.jit(do_not_specialize=["num_descriptors", "tiles_per_descriptor"])  # type: ignore[untyped-decorator]
def copy_descriptors(
    descriptors: tl.tensor,  # int64 (3, num_descriptors): source addresses, target addresses, sizes in bytes below 2^31
    num_descriptors: tl.tensor,
    tiles_per_descriptor: tl.tensor,  # of the largest
    UNIT: tl.constexpr,  # noqa: N803
    ITEMS: tl.constexpr,  # noqa: N803
    WORDS: tl.constexpr,  # noqa: N803
) -> None:
    """Copies flat descriptors. Expects num_descriptors * tiles_per_descriptor < 2^31."""
    pieces = num_descriptors * tiles_per_descriptor
    for first in range(tl.program_id(0) * ITEMS, pieces, tl.num_programs(0) * ITEMS):
        piece = first + tl.arange(0, ITEMS)
        number = piece // tiles_per_descriptor
        ours = piece < pieces
        source = tl.load(descriptors + number, mask=ours, other=0)
        target = tl.load(descriptors + num_descriptors + number, mask=ours, other=0)
        size = tl.load(descriptors + 2 * num_descriptors + number, mask=ours, other=0).to(tl.int32)
        first_byte = (piece - number * tiles_per_descriptor) * (WORDS * UNIT)
        _copy_words(source, target, size, size, size, first_byte, size, UNIT, WORDS, False)
