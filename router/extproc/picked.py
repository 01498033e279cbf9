# SPDX-License-Identifier: Apache-2.0
"""What a stream asks for, and what it gets: the seam between the protocol and whoever decides."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from router.extproc.prefills import OwnLeg
from router.gateway.headers import Headers
from router.gateway.routing import Attempt
from router.request import InferenceRequest, Outcome, Usage


@dataclass(frozen=True, slots=True)
class Wanted:
    """A request for which an endpoint is wanted now."""

    headers: Headers
    body: bytes
    """Empty where the proxy does not show it."""
    subset: Sequence[str] | None
    """Endpoints to choose among; None: all."""
    shows_body: bool = True
    """False: the request has a body that stays unseen and cannot be changed."""


@dataclass(frozen=True, slots=True)
class Picked:
    """An endpoint, and what goes there."""

    request: InferenceRequest
    attempt: Attempt
    destination: str
    """``ip:port``, then those to fall back to, joined by commas."""
    set_headers: Headers = ()
    remove_headers: Sequence[bytes] = ()
    worker_at: Callable[[str], str | None] = field(default=lambda _: None)
    """The worker at an ``ip:port``, if it is one of ours."""
    scores: Mapping[str, float] | None = None
    """Of the endpoints that were weighed, larger is better; None: not to be told."""

    own_leg: OwnLeg | None = None
    """A prefill leg that is ours to send once the request goes on."""

    @property
    def insert(self) -> Mapping[str, object]:
        """Top-level keys to be added to the body."""
        return self.attempt.route.insert


@dataclass(slots=True)
class Tally:
    """What one stream amounted to. Times are of the clock that the stream is given."""

    started_s: float
    request_bytes: int = 0
    response_bytes: int = 0
    wanted_s: float | None = None
    """The request was whole, and its endpoint asked for."""
    routed_s: float | None = None
    first_token_s: float | None = None
    ended_s: float | None = None
    """The answer's proper end, or that of the stream."""
    request: InferenceRequest | None = None
    usage: Usage | None = None
    outcome: Outcome | None = None
    """How the last attempt ended; None where nothing was routed."""
    status: int | None = None
    """Of the answer."""
    refused_status: int | None = None
    """Of an answer that the picker gave itself."""


class Observer(Protocol):
    """Told of every stream: once that it is routed, if it is, and once that it is over."""

    def routed(self, tally: Tally) -> None: ...

    def ended(self, tally: Tally) -> None: ...
