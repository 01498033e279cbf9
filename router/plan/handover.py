# SPDX-License-Identifier: Apache-2.0
"""A prefill by one worker for another that decodes, as plain values."""

from __future__ import annotations

from dataclasses import dataclass

from router.fleet.worker import Transfer
from router.plan.candidate import Candidate, Plan


@dataclass(frozen=True, slots=True)
class Prefiller:
    """One rank of a worker that only prefills."""

    candidate: Candidate
    transfer: Transfer
    host: str = ""
    """Of the rank's P2P control channel; empty where the blocks go through NixlConnector."""
    port: int = 0


@dataclass(frozen=True, slots=True)
class Handover:
    """What the plan of a decode worker carries when another worker computes the prompt for it."""

    prefill: Plan
    """Of the worker that computes the prompt, by its own best path."""
    transfer: Transfer
    host: str = ""
    port: int = 0
