# SPDX-License-Identifier: Apache-2.0
"""Copies without a kernel: the driver's batched copy, and the host's own.

Both take what vLLM's workers pass to `ops.swap_blocks_batch`: three int64 CPU tensors of addresses and sizes. So
vLLM's function fits `BatchCopy` as well, and may be given instead.

`cuMemcpyBatchAsync` exists from CUDA 12.8 on. Its exported symbol keeps the signature of 12.8 (with failIdx; cuda.h of
CUDA 13 names the one without it cuMemcpyBatchAsync_v2). It is not allowed on the legacy default stream; there, and on
older drivers, copies are enqueued one by one.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Protocol

import torch

from .errors import DriverFailed

_ORDER_STREAM, _ORDER_ANY = 1, 3  # CUmemcpySrcAccessOrder


class BatchCopy(Protocol):
    """Enqueues copies of sizes[i] bytes from src[i] to dst[i] on the current stream."""

    def __call__(
        self,
        src_ptrs: torch.Tensor,
        dst_ptrs: torch.Tensor,
        sizes: torch.Tensor,
        is_src_access_order_any: bool = False,
    ) -> None:
        """`is_src_access_order_any`: nothing that the stream still runs writes the sources."""


def copy_on_host(
    src_ptrs: torch.Tensor, dst_ptrs: torch.Tensor, sizes: torch.Tensor, is_src_access_order_any: bool = False
) -> None:
    """A BatchCopy between CPU addresses; done when it returns. About 0.5 us per copy beside the bytes."""
    for source, target, size in zip(src_ptrs.tolist(), dst_ptrs.tolist(), sizes.tolist(), strict=True):
        ctypes.memmove(target, source, size)


class _Location(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class _CopyAttributes(ctypes.Structure):
    """CUmemcpyAttributes of cuda.h 12.8 to 13.1. The hints matter to managed memory only and stay zero."""

    _fields_ = (
        ("srcAccessOrder", ctypes.c_int),
        ("srcLocHint", _Location),
        ("dstLocHint", _Location),
        ("flags", ctypes.c_uint),
    )


def current_cuda_stream() -> int:
    """The handle of torch's current stream; 0 is the legacy default stream."""
    return int(torch.cuda.current_stream().cuda_stream)


class DriverCopy:
    """A BatchCopy by the CUDA driver. Thread-safe; needs a current CUDA context, as torch keeps one."""

    def __init__(
        self, library: str = "libcuda.so.1", current_stream: Callable[[], int] = current_cuda_stream
    ) -> None:
        """Raises DriverFailed where the driver's library cannot be loaded."""
        try:
            self._driver = ctypes.CDLL(library)
        except OSError as error:
            raise DriverFailed(f"the CUDA driver cannot be loaded: {error}") from error
        self._current_stream = current_stream
        self.is_batched = hasattr(self._driver, "cuMemcpyBatchAsync")

    def __call__(
        self,
        src_ptrs: torch.Tensor,
        dst_ptrs: torch.Tensor,
        sizes: torch.Tensor,
        is_src_access_order_any: bool = False,
    ) -> None:
        """Raises DriverFailed with the driver's code and, if it tells, the number of the copy it refused."""
        sources, targets, lengths = src_ptrs.contiguous(), dst_ptrs.contiguous(), sizes.contiguous()
        for column in (sources, targets, lengths):
            if column.dtype != torch.int64 or column.device.type != "cpu" or column.shape != sizes.shape:
                raise DriverFailed(f"addresses and sizes are int64 CPU tensors of one length, not {column}")
        if not sizes.numel():
            return
        stream = self._current_stream()
        if self.is_batched and stream:
            order = _ORDER_ANY if is_src_access_order_any else _ORDER_STREAM
            self._batch(sources, targets, lengths, stream, order)
        else:
            self._one_by_one(sources, targets, lengths, stream)

    def _batch(
        self, sources: torch.Tensor, targets: torch.Tensor, sizes: torch.Tensor, stream: int, order: int
    ) -> None:
        attributes = _CopyAttributes(srcAccessOrder=order)
        first = ctypes.c_size_t(0)
        refused = ctypes.c_size_t(2**64 - 1)
        code = self._driver.cuMemcpyBatchAsync(
            ctypes.c_void_p(targets.data_ptr()),
            ctypes.c_void_p(sources.data_ptr()),
            ctypes.c_void_p(sizes.data_ptr()),
            ctypes.c_size_t(sizes.numel()),
            ctypes.byref(attributes),
            ctypes.byref(first),
            ctypes.c_size_t(1),
            ctypes.byref(refused),
            ctypes.c_void_p(stream),
        )
        if code:
            which = f", copy {refused.value}" if refused.value < sizes.numel() else ""
            raise DriverFailed(f"cuMemcpyBatchAsync of {sizes.numel()} copies: CUDA error {code}{which}")

    def _one_by_one(
        self, sources: torch.Tensor, targets: torch.Tensor, sizes: torch.Tensor, stream: int
    ) -> None:
        rows = zip(sources.tolist(), targets.tolist(), sizes.tolist(), strict=True)
        for number, (source, target, size) in enumerate(rows):
            code = self._driver.cuMemcpyAsync(
                ctypes.c_uint64(target),
                ctypes.c_uint64(source),
                ctypes.c_size_t(size),
                ctypes.c_void_p(stream),
            )
            if code:
                raise DriverFailed(f"cuMemcpyAsync of copy {number}: CUDA error {code}")
