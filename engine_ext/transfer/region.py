# SPDX-License-Identifier: Apache-2.0
"""The host region that holds blocks: equal blocks, one after the other, in one mapping of this process."""

from __future__ import annotations

import ctypes
from typing import Annotated, Literal

import msgspec

from .errors import TransferConfigError

Positive = Annotated[int, msgspec.Meta(ge=1)]


class Region(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where a region lies in the process that owns it. Block `i` begins at `base_address + i * block_bytes`."""

    base_address: Positive
    block_bytes: Positive
    blocks: Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)]
    memory: Literal["DRAM", "VRAM"] = "DRAM"

    @property
    def size_bytes(self) -> int:
        return self.block_bytes * self.blocks

    def holds(self, blocks: list[int]) -> bool:
        """Whether all of these are block numbers of this region. O(n)."""
        return not blocks or (min(blocks) >= 0 and max(blocks) < self.blocks)


class HostRegion:
    """A Region over a writable buffer of this process, kept in place as long as this object lives.

    The buffer's owner cannot close or resize it before `release` (an mmap raises BufferError), so registered
    memory is never unmapped under a transfer.
    """

    def __init__(self, buffer: memoryview, block_bytes: int) -> None:
        flat = memoryview(buffer).cast("B")
        if block_bytes < 1 or flat.nbytes == 0 or flat.nbytes % block_bytes:
            raise TransferConfigError(
                "block_bytes", block_bytes, f"a divisor of the buffer's {flat.nbytes} bytes"
            )
        self._pin: ctypes.Array[ctypes.c_char] | None = (ctypes.c_char * flat.nbytes).from_buffer(flat)
        self.region = Region(ctypes.addressof(self._pin), block_bytes, flat.nbytes // block_bytes)

    def release(self) -> None:
        """Lets the buffer's owner close it. Only after every agent that registered the region is gone."""
        self._pin = None
