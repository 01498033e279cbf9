# SPDX-License-Identifier: Apache-2.0
"""The engine's host memory as a row of equal blocks, copied to and from without holding the interpreter."""

from __future__ import annotations

import ctypes


class HostRegion:
    """Of shape (blocks, block bytes), contiguous, bytes. `release` before the owner of the memory unmaps it."""

    def __init__(self, view: memoryview) -> None:
        if view.readonly or view.ndim != 2 or not view.c_contiguous or view.shape is None:
            raise ValueError(f"a writable, contiguous view of two dimensions is needed, not {view!r}")
        self.blocks = view.shape[0]
        self.block_bytes = view.nbytes // self.blocks
        flat = view.cast("B")
        self._flat = flat
        memory = (ctypes.c_char * view.nbytes).from_buffer(flat)
        self._address = ctypes.addressof(memory)
        self._memory: ctypes.Array[ctypes.c_char] | None = memory  # keeps it mapped

    def copy_out(self, block: int, target: memoryview) -> None:
        """Into a contiguous writable buffer of a block's length."""
        into = (ctypes.c_char * self.block_bytes).from_buffer(target)
        ctypes.memmove(into, self._address_of(block), self.block_bytes)

    def copy_in(self, block: int, source: memoryview) -> None:
        """From a contiguous writable buffer of a block's length (ctypes takes no other)."""
        out = (ctypes.c_char * self.block_bytes).from_buffer(source)
        ctypes.memmove(self._address_of(block), out, self.block_bytes)

    def release(self) -> None:
        """Nobody copies after this."""
        self._memory = None
        self._flat.release()

    def _address_of(self, block: int) -> int:
        if not 0 <= block < self.blocks:
            raise IndexError(f"block {block} of {self.blocks}")
        return self._address + block * self.block_bytes
