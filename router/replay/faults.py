# SPDX-License-Identifier: Apache-2.0
"""Faults on a schedule, as the command line gives them.

events@T:W      after T seconds nothing that worker W publishes arrives
transport@T:W   after T seconds its peers can neither ask W nor be asked by it
kill@T:W        after T seconds its process dies; it comes back half a minute later with nothing but its disk
kill-source@N   the source of the N-th pull dies right after the request was sent
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from router.errors import ConfigError
from router.replay.virtual import VirtualFleetSetup

FORMS = "events@SECONDS:WORKER, transport@SECONDS:WORKER, kill@SECONDS:WORKER or kill-source@PULL"


def with_faults(setup: VirtualFleetSetup, texts: Sequence[str]) -> VirtualFleetSetup:
    """The fleet with faults; the later of two of one kind for one worker counts.

    Raises:
        ConfigError: something else, or no such worker.
    """
    events, transport, killed = (
        dict(one) for one in (setup.events_cut_at_s, setup.transport_cut_at_s, setup.killed_at_s)
    )
    kinds = {"events": events, "transport": transport, "kill": killed}
    kill_source_of = setup.kill_source_of
    for text in texts:
        kind, _, rest = text.partition("@")
        try:
            if kind == "kill-source":
                kill_source_of = _pull(rest)
            else:
                worker, at_s = _worker_and_time(rest, setup.workers)
                kinds[kind][worker] = at_s
        except (KeyError, ValueError):
            accepted = f"{FORMS}, with a worker from 0 to {setup.workers - 1}"
            raise ConfigError("--fault", text, accepted) from None
    return replace(
        setup,
        events_cut_at_s=events,
        transport_cut_at_s=transport,
        killed_at_s=killed,
        kill_source_of=kill_source_of,
    )


def _pull(text: str) -> int:
    number = int(text)
    if number < 1:
        raise ValueError(text)
    return number


def _worker_and_time(text: str, workers: int) -> tuple[str, float]:
    at, _, worker = text.partition(":")
    at_s, number = float(at), int(worker.removeprefix("w"))
    if not 0 <= at_s < float("inf") or not 0 <= number < workers:
        raise ValueError(text)
    return f"w{number}", at_s
