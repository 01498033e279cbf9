# SPDX-License-Identifier: Apache-2.0
"""Tests under kernels/ run in processes of their own, started by test_kernels.py."""

from __future__ import annotations

collect_ignore = ["kernels"]
