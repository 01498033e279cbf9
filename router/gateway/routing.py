# SPDX-License-Identifier: Apache-2.0
"""The seam between the proxy (bytes) and the dispatcher (choice): what the gateway asks for and reports."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from router.request import InferenceRequest, Outcome, Usage


@dataclass(frozen=True, slots=True)
class PrefillLeg:
    """A second call that computes the prompt for the worker of the route; its answer never reaches the client."""

    worker_id: str
    base_url: str
    insert: Mapping[str, object]
    """Top-level keys for its body, besides those that ask for a single token."""
    upstream_headers: tuple[tuple[bytes, bytes], ...]
    first: bool
    """The other call needs ``kv_transfer_params`` from this one's answer; otherwise both run at once."""
    timeout_s: float | None = None
    """Limit for its whole answer, where that is shorter than the gateway's own."""


@dataclass(frozen=True, slots=True)
class Route:
    """Where one attempt goes.

    ``insert`` holds top-level keys to add to the JSON body (``kv_transfer_params``, ``cache_salt``);
    empty means the body goes out as it came in.
    """

    request_id: str
    worker_id: str
    base_url: str
    insert: Mapping[str, object]
    upstream_headers: tuple[tuple[bytes, bytes], ...]
    response_headers: tuple[tuple[bytes, bytes], ...]
    prefill: PrefillLeg | None = None


class Attempt(Protocol):
    """One try at one worker. ``finish`` ends it exactly once; later calls change nothing."""

    @property
    def route(self) -> Route: ...

    def first_byte(self) -> None:
        """The first byte of the answer's body has arrived."""

    def usage(self, usage: Usage) -> None:
        """The engine's own token counts, when the answer carries them."""

    def prefill_finished(self, outcome: Outcome, status: int | None, usage: Usage | None) -> None:
        """The prefill leg of the route is over; called once if there is one, before or after the rest."""

    def finish(self, outcome: Outcome, status: int | None) -> None:
        """The attempt is over; its load is released."""

    def fallbacks(self, most: int) -> tuple[str, ...]:
        """At most so many workers, best first, that may be sent what goes to the route's, byte for byte.

        None for whoever sends the request itself and so can ask for another attempt.
        """
        ...

    def scores_s(self) -> Mapping[str, float]:
        """Of the workers that were weighed, the best plan's score of each; empty as for ``fallbacks``."""
        ...

    def served_by(self, worker_id: str) -> Attempt | None:
        """A proxy that was given fallbacks says who answers.

        Returns the attempt that stands for the answer: this one, or one that takes its place while this one ends. None
        where that worker was no candidate; then this attempt is still to be finished.
        """
        ...


class Dispatcher(Protocol):
    """Chooses a worker for each attempt."""

    async def dispatch(
        self, request: InferenceRequest, tried: frozenset[str], allowed: frozenset[str] | None = None
    ) -> Attempt:
        """Choose among the workers not in ``tried``, and in ``allowed`` if given; load counts from the return on.

        Raises:
            NoWorkerAvailable: nothing is left to try.
            RequestError: the request must not be sent at all.
        """
        ...


class ReadyDispatcher(Dispatcher, Protocol):
    """One that can choose without a task of its own for it, as most requests need none."""

    def dispatch_now(
        self, request: InferenceRequest, tried: frozenset[str], allowed: frozenset[str] | None = None
    ) -> Attempt | None:
        """The same as ``dispatch``, at once. None, and nothing has happened, where something must be waited for."""
        ...
