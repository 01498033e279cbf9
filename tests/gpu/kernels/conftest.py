# SPDX-License-Identifier: Apache-2.0
"""Settings for tests that run Triton itself. They run in a process of their own: see ../test_kernels.py.

TRITON_INTERPRET=1 pytest --confcutdir=tests/gpu/kernels tests/gpu/kernels/interpreted
pytest --confcutdir=tests/gpu/kernels tests/gpu/kernels/compiled
"""

from __future__ import annotations

import os

# Triton 3.9 warns until told; the kernels have no floating-point arithmetic to fuse.
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")
