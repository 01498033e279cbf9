# SPDX-License-Identifier: Apache-2.0
"""``pointsman demo``: a simulated fleet, a workload, and what routing saved."""

from router.demo.command import run

__all__ = ["run"]
