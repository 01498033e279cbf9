# SPDX-License-Identifier: Apache-2.0
"""Prefill legs that the picker sends itself, while the proxy sends the request to the worker that decodes.

That is possible where both calls go out at once (vLLM's P2P tier). Where the second needs what the first one answered
(NixlConnector), both are a sidecar's to make, and it is told whom to ask by a header.
"""

from __future__ import annotations

from dataclasses import dataclass

from router.extproc.names import STEERING
from router.gateway.headers import Headers
from router.gateway.prefill import PrefillCall, Report
from router.gateway.routing import PrefillLeg
from router.gateway.settings import GatewaySettings
from router.gateway.upstream import UpstreamClient
from router.request import InferenceRequest


@dataclass(frozen=True, slots=True)
class OwnLeg:
    """A prefill leg that is the picker's to send."""

    leg: PrefillLeg
    request: InferenceRequest
    target: str
    """Path and query."""
    headers: Headers
    """What of the client's headers goes to workers."""


class PrefillSender:
    """Sends prefill legs. ``open`` inside the running loop, ``close`` at the end."""

    def __init__(self, settings: GatewaySettings) -> None:
        self._settings = settings
        self._client: UpstreamClient | None = None

    async def open(self) -> None:
        self._client = UpstreamClient(self._settings)

    async def close(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            await client.aclose()

    def send(self, own: OwnLeg, report: Report) -> PrefillCall:
        """Send it now; ``report`` hears of its end, once.

        Its failure ends nothing: the request is on its way, and the worker that decodes computes the prompt itself
        once it has waited for as long as it does.
        """
        if self._client is None:
            raise RuntimeError("not open")
        call = PrefillCall(
            report,
            own.leg,
            own.request,
            own.target,
            own.headers,
            client=self._client,
            settings=self._settings,
        )
        call.start(lambda: None)
        return call


def for_workers(headers: Headers, ending: frozenset[bytes]) -> Headers:
    """A proxy's headers as a client would have sent them, without those that end at the picker."""
    return [
        (name, value)
        for name, value in headers
        if not name.startswith(b":") and name not in ending and name not in STEERING
    ]
