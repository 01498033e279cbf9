# SPDX-License-Identifier: Apache-2.0
"""The gRPC health services of the protocol: ``liveness``, ``readiness``, and those of the picker.

Alive is what answers. Ready is what has asked every worker once, knows who they are where discovery says, and is not
draining; a fleet without a healthy worker
is no reason to be unready, since the picker then answers 503 with a reason, which a proxy without a picker cannot.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from router.extproc.names import LIVENESS_SERVICE, READY_SERVICES

_LOOK_S = 0.2


class HealthService(health_pb2_grpc.HealthServicer):  # type: ignore[misc]
    """Answers from what is the case now."""

    def __init__(self, is_ready: Callable[[], bool]) -> None:
        self._is_ready = is_ready

    async def Check(self, request: Any, context: Any) -> Any:  # noqa: N802 - the name is the protocol's
        """The state of one service; NOT_FOUND for a name that is none of them."""
        state = self._state(request.service)
        if state is None:
            await context.abort(grpc.StatusCode.NOT_FOUND, "no such service")
        return health_pb2.HealthCheckResponse(status=state)

    async def Watch(self, request: Any, context: Any) -> None:  # noqa: N802
        """The state now, and again whenever it changes."""
        told = None
        while True:
            state = self._state(request.service)
            if told is None or state != told:
                told = state
                unknown = health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
                await context.write(
                    health_pb2.HealthCheckResponse(status=unknown if state is None else state)
                )
            await asyncio.sleep(_LOOK_S)

    def _state(self, service: str) -> int | None:
        if service == LIVENESS_SERVICE:
            alive: int = health_pb2.HealthCheckResponse.SERVING
            return alive
        if service not in READY_SERVICES:
            return None
        ready: int = (
            health_pb2.HealthCheckResponse.SERVING
            if self._is_ready()
            else health_pb2.HealthCheckResponse.NOT_SERVING
        )
        return ready
