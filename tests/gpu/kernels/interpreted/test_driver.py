# SPDX-License-Identifier: Apache-2.0
"""The call of the driver's batched copy, against a driver of our own that is compiled from NVIDIA's header.

The stand-in checks the call, not the copy: the compiler holds its prototypes against the real cuda.h, and it copies
CPU memory. What a real driver does with the call is for a machine with a GPU.
"""

from __future__ import annotations

import ctypes
import subprocess
from pathlib import Path

import pytest
import torch
import triton.backends.nvidia

from gpu_ops.driver import DriverCopy
from gpu_ops.errors import DriverFailed

HEADERS = Path(triton.backends.nvidia.__file__).parent / "include"
SOURCE = r"""
#define __CUDA_API_VERSION_INTERNAL /* the exported names, as the library has them */
#include <cuda.h>
#include <string.h>
unsigned batches, singles, order, flags;
void *stream;
size_t refused = (size_t)-1;
#ifndef NO_BATCH
CUresult CUDAAPI cuMemcpyBatchAsync(CUdeviceptr *dsts, CUdeviceptr *srcs, size_t *sizes, size_t count,
                                    CUmemcpyAttributes *attrs, size_t *attrsIdxs, size_t numAttrs,
                                    size_t *failIdx, CUstream hStream) {
  if (!hStream || numAttrs != 1 || attrsIdxs[0] != 0 || attrs[0].srcLocHint.id || attrs[0].dstLocHint.id)
    return CUDA_ERROR_INVALID_VALUE;
  batches++, stream = hStream, order = attrs[0].srcAccessOrder, flags = attrs[0].flags;
  for (size_t i = 0; i < count; i++) {
    if (i == refused) { *failIdx = i; return CUDA_ERROR_INVALID_VALUE; }
    memcpy((void *)dsts[i], (void *)srcs[i], sizes[i]);
  }
  return CUDA_SUCCESS;
}
#endif
CUresult CUDAAPI cuMemcpyAsync(CUdeviceptr dst, CUdeviceptr src, size_t size, CUstream hStream) {
  if (singles++ == refused) return CUDA_ERROR_INVALID_VALUE;
  stream = hStream;
  memcpy((void *)dst, (void *)src, size);
  return CUDA_SUCCESS;
}
"""


def build(folder: Path, *flags: str) -> Path:
    source, library = folder / "driver.c", folder / f"driver{len(flags)}.so"
    source.write_text(SOURCE)
    subprocess.run(
        ["cc", "-shared", "-fPIC", f"-I{HEADERS}", *flags, str(source), "-o", str(library)], check=True
    )
    return library


@pytest.fixture
def library(tmp_path: Path) -> Path:
    return build(tmp_path)


def copies() -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
    source = torch.arange(100, dtype=torch.int8)
    target = torch.full((100,), -1, dtype=torch.int8)
    rows = torch.tensor([(0, 50, 10), (20, 0, 30), (90, 90, 1)], dtype=torch.int64).T
    return source, target, [rows[0] + source.data_ptr(), rows[1] + target.data_ptr(), rows[2]]


def copied(source: torch.Tensor) -> torch.Tensor:
    target = torch.full((100,), -1, dtype=torch.int8)
    target[50:60], target[0:30], target[90:91] = source[0:10], source[20:50], source[90:91]
    return target


def read(library: Path, name: str) -> int:
    return ctypes.c_uint.in_dll(ctypes.CDLL(str(library)), name).value


@pytest.mark.parametrize(("any_order", "order"), [(True, 3), (False, 1)])
def test_a_batch_is_one_call_with_one_set_of_attributes(library: Path, any_order: bool, order: int) -> None:
    source, target, columns = copies()
    copy = DriverCopy(str(library), current_stream=lambda: 0x7F0000001234)
    copy(*columns, is_src_access_order_any=any_order)
    assert torch.equal(target, copied(source))
    assert (read(library, "batches"), read(library, "singles")) == (1, 0)
    assert (read(library, "order"), read(library, "flags")) == (order, 0)
    assert ctypes.c_void_p.in_dll(ctypes.CDLL(str(library)), "stream").value == 0x7F0000001234


def test_the_default_stream_and_older_drivers_get_single_copies(tmp_path: Path) -> None:
    for library, stream in ((build(tmp_path), 0), (build(tmp_path, "-DNO_BATCH"), 7)):
        source, target, columns = copies()
        DriverCopy(str(library), current_stream=lambda stream=stream: stream)(*columns)  # type: ignore[misc]
        assert torch.equal(target, copied(source))
        assert read(library, "singles") == 3


def test_a_refused_copy_is_named(library: Path, tmp_path: Path) -> None:
    ctypes.c_size_t.in_dll(ctypes.CDLL(str(library)), "refused").value = 1
    source, target, columns = copies()
    with pytest.raises(DriverFailed, match=r"3 copies: CUDA error 1, copy 1"):
        DriverCopy(str(library), current_stream=lambda: 7)(*columns)
    with pytest.raises(DriverFailed, match=r"copy 1: CUDA error 1"):
        DriverCopy(str(library), current_stream=lambda: 0)(*columns)
    assert torch.equal(target[50:60], source[:10]), "copies before it were made"


def test_no_copies_are_no_call(library: Path) -> None:
    empty = torch.empty(0, dtype=torch.int64)
    DriverCopy(str(library), current_stream=lambda: 7)(empty, empty, empty)
    assert read(library, "batches") == 0


def test_columns_that_are_no_addresses_are_refused(library: Path) -> None:
    _, _, (sources, targets, sizes) = copies()
    copy = DriverCopy(str(library), current_stream=lambda: 7)
    for bad in ((sources.int(), targets, sizes), (sources[:2], targets, sizes)):
        with pytest.raises(DriverFailed, match="int64"):
            copy(*bad)
    assert read(library, "batches") == 0


def test_a_machine_without_a_driver_is_told_so(tmp_path: Path) -> None:
    with pytest.raises(DriverFailed, match="cannot be loaded"):
        DriverCopy(str(tmp_path / "libcuda.so.1"))
