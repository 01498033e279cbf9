# SPDX-License-Identifier: Apache-2.0
"""The gRPC health services of the protocol: ``liveness``, ``readiness``, and those of the picker.

Alive is what answers. Ready is what has asked every worker once, knows who they are where discovery says, and is not
draining; a fleet without a healthy worker
is no reason to be unready, since the picker then answers 503 with a reason, which a proxy without a picker cannot.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

from google.protobuf.message import DecodeError
from grpc_health.v1 import health_pb2

from router.extproc.http2.grpc import Call, MakeHandler, Status
from router.extproc.names import LIVENESS_SERVICE, READY_SERVICES

_LOOK_S = 0.2
_SERVING: int = health_pb2.HealthCheckResponse.SERVING
_NOT_SERVING: int = health_pb2.HealthCheckResponse.NOT_SERVING
_UNKNOWN: int = health_pb2.HealthCheckResponse.SERVICE_UNKNOWN


class HealthService:
    """``grpc.health.v1.Health``; answers from what is the case now."""

    def __init__(self, is_ready: Callable[[], bool]) -> None:
        self._is_ready = is_ready

    def methods(self) -> Mapping[bytes, MakeHandler]:
        return {
            b"/grpc.health.v1.Health/Check": lambda call: _Check(call, self.state),
            b"/grpc.health.v1.Health/Watch": lambda call: _Watch(call, self.state),
        }

    def state(self, service: str) -> int | None:
        """SERVING or NOT_SERVING; None for a name that is none of ours."""
        if service == LIVENESS_SERVICE:
            return _SERVING
        if service not in READY_SERVICES:
            return None
        return _SERVING if self._is_ready() else _NOT_SERVING


class _Asked:
    """A call with one request."""

    def __init__(self, call: Call, state: Callable[[str], int | None]) -> None:
        self._call = call
        self._state = state
        self._service: str | None = None

    def message(self, data: bytes) -> None:
        try:
            self._service = health_pb2.HealthCheckRequest.FromString(data).service
        except DecodeError:
            self._call.finish(Status.INVALID_ARGUMENT, "not a HealthCheckRequest")

    def half_closed(self) -> None:
        if self._service is None:
            self._call.finish(Status.INVALID_ARGUMENT, "no request")
        else:
            self._answer(self._service)

    def gone(self) -> None:
        pass

    def _answer(self, service: str) -> None:
        raise NotImplementedError

    def _tell(self, state: int) -> None:
        self._call.write(health_pb2.HealthCheckResponse(status=state).SerializeToString())


class _Check(_Asked):
    """The state now; NOT_FOUND for a name that is none of ours."""

    def _answer(self, service: str) -> None:
        state = self._state(service)
        if state is None:
            self._call.finish(Status.NOT_FOUND, "no such service")
        else:
            self._tell(state)
            self._call.finish()


class _Watch(_Asked):
    """The state now, and again whenever it changes."""

    _told: int | None = None
    _timer: asyncio.TimerHandle | None = None

    def gone(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _answer(self, service: str) -> None:
        state = self._state(service)
        state = _UNKNOWN if state is None else state
        if state != self._told:
            self._told = state
            self._tell(state)
        self._timer = asyncio.get_running_loop().call_later(_LOOK_S, self._answer, service)
