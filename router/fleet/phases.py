# SPDX-License-Identifier: Apache-2.0
"""Whether a fleet has workers for both phases of a request: prefill and decode. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from router.errors import ConfigError
from router.fleet.worker import Role, WorkerSpec, WorkerStatus

CAN_ANSWER = (Role.BOTH, Role.DECODE)
"""Roles that may be sent a whole request: a decode worker can compute a prompt itself."""
CAN_PREFILL = (Role.BOTH, Role.PREFILL)


def check_phases(specs: Sequence[WorkerSpec]) -> None:
    """Raise for a fleet in which a phase, or one of the workers, can never be used.

    Raises:
        ConfigError: names the worker, or ``fleet.workers`` where all of them together are at fault.
    """
    if specs and not any(spec.role in CAN_ANSWER for spec in specs):
        raise ConfigError("fleet.workers", "prefill workers only", "a worker of role decode or both too")
    if specs and not any(spec.role in CAN_PREFILL for spec in specs):
        raise ConfigError("fleet.workers", "decode workers only", "a worker of role prefill or both too")
    takers = {spec.transfer for spec in specs if spec.role in CAN_ANSWER}
    for position, spec in enumerate(specs):
        field = f"fleet.workers[{position}].transfer"
        if spec.role is not Role.BOTH and spec.transfer is None:
            raise ConfigError(field, None, f"p2p (with an address in p2p) or nixl for role {spec.role.value}")
        if spec.role is Role.PREFILL and spec.transfer not in takers:
            raise ConfigError(field, str(spec.transfer), "the transfer of a worker of role decode or both")


def models_without(statuses: Sequence[WorkerStatus], able: Sequence[Role]) -> list[str]:
    """Served models for which no answering worker has one of the roles ``able``."""
    served: set[str] = set()
    covered: set[str] = set()
    for status in statuses:
        if status.answering:
            served.update(status.models)
            if status.spec.role in able:
                covered.update(status.models)
    return sorted(served - covered)
