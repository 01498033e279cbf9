# SPDX-License-Identifier: Apache-2.0
"""What can go wrong when blocks are moved.

GpuOpsError
├── PlanRefused      a plan, a layout or a list of moves would touch bytes outside its pages
└── DriverFailed     the CUDA driver refused a copy, or is not there
"""

from __future__ import annotations


class GpuOpsError(Exception):
    """Root of this package's errors."""


class PlanRefused(GpuOpsError, ValueError):
    """Refused before any byte moved; the message names the value and what would be accepted."""


class DriverFailed(GpuOpsError, RuntimeError):
    """The driver's own code is in the message. Some copies of the batch may have been made."""
