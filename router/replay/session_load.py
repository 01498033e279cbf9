# SPDX-License-Identifier: Apache-2.0
"""Agent sessions at a given share of what a fleet can bear, in a steady state from the first measured second on.

Capacity is a property of fleet and trace, not of any router: the sessions per second at which

    GPU seconds of a session = workers * 1 second
    GPU seconds              = for each of its requests, the prefill of what no earlier request of the session had,
                               in steps of the token budget, and what each output token adds to a step

by the constants of the engine, as if every session's own history stayed cached and nothing else did. A router that
loses history meets the limit earlier, one that shares the sessions' common beginning a little later.

A session lasts much longer than what one wants to replay. So sessions are drawn from the file with replacement
and begun at random times (a Poisson process) far enough before the window that those of any length are found in
the midst of it as often as they would be. What each of these had asked last comes first, spread over as long as
60 % of the fleet takes for it, so that the window begins with histories that are cached wherever the router
put them. Only requests of the window are measured.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from random import Random

from engine_ext.sim.profile import SimProfile
from router.replay.sessions import Session, in_order, session_agents
from router.replay.traces import TraceRequest

WARM_LOAD = 0.6
MAX_GAP_S = 60.0
MAX_INPUT_TOKENS = 128_000
"""Defaults of kv-cache-tester's own replayer (``--max-delay``, ``--max-context``)."""

_PAUSE_S = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionLoad:
    """How much of it."""

    load: float
    """Share of the fleet's capacity."""
    workers: int
    window_s: float
    seed: int
    max_gap_s: float = MAX_GAP_S
    """Longer pauses within a session are cut to that."""
    max_input_tokens: int = MAX_INPUT_TOKENS
    """Longer requests are left out."""
    step_tokens: int = 8192
    """Prompt tokens that an engine computes in one step at most."""


@dataclass(frozen=True, slots=True)
class LoadedTraffic:
    """Requests in order of arrival."""

    requests: list[TraceRequest]
    measured_from_s: float
    sessions_per_s: float
    too_long: int
    """Requests left out."""


def gpu_seconds(requests: Sequence[TraceRequest], profile: SimProfile, step_tokens: int) -> float:
    """GPU seconds of a session, as defined above."""
    held: set[int] = set()
    total_s = 0.0
    for request in sorted(requests, key=lambda one: one.arrival_s):
        cached = 0
        for block in request.block_ids[: request.full_blocks]:
            if block not in held:
                break
            cached += request.block_size_tokens
        held.update(request.block_ids[: request.full_blocks])
        total_s += _prefill_s(request, min(cached, request.input_tokens - 1), profile, step_tokens)
        total_s += request.output_tokens * (profile.step_s(1, request.input_tokens) - profile.step_s(0, 0))
    return total_s


def _prefill_s(request: TraceRequest, cached: int, profile: SimProfile, step_tokens: int) -> float:
    missing = request.input_tokens - cached
    return profile.prefill_s(missing, cached) + -(-missing // step_tokens) * profile.step_s(0, 0)


def loaded_traffic(sessions: Sequence[Session], profile: SimProfile, wanted: SessionLoad) -> LoadedTraffic:
    """Traffic at that load. Equal arguments give equal requests.

    Raises:
        TraceError: a request has too few block ids.
        ValueError: no session has a request that is short enough.
    """
    random = Random(wanted.seed)
    shapes = [_Shape.of(session, profile, wanted) for session in sessions]
    mean_gpu_s = sum(one.gpu_s for one in shapes) / len(shapes)
    if not mean_gpu_s:
        raise ValueError("no session has a request that is short enough")
    sessions_per_s = wanted.load * wanted.workers / mean_gpu_s
    before: list[TraceRequest] = []
    within: list[TraceRequest] = []
    too_long = 0
    start_s = -max(one.length_s for one in shapes)
    number = 0
    while (start_s := start_s + random.expovariate(sessions_per_s)) < wanted.window_s:
        number += 1
        shape = shapes[random.randrange(len(shapes))]
        if start_s + shape.length_s < 0:
            continue
        for agent in session_agents(shape.session, number, wanted.max_gap_s):
            times = [replace(one, arrival_s=start_s + one.arrival_s) for one in agent]
            fitting = [one for one in times if one.input_tokens <= wanted.max_input_tokens]
            too_long += sum(0 <= one.arrival_s < wanted.window_s for one in times)
            too_long -= sum(0 <= one.arrival_s < wanted.window_s for one in fitting)
            before.extend(_last_before(fitting))
            within.extend(one for one in fitting if 0 <= one.arrival_s < wanted.window_s)
    warm = list(_spread(before, profile, wanted))
    from_s = warm[-1].arrival_s + _PAUSE_S if warm else 0.0
    measured = [replace(one, arrival_s=from_s + one.arrival_s) for one in within]
    return LoadedTraffic(in_order([*warm, *measured]), from_s, sessions_per_s, too_long)


@dataclass(frozen=True, slots=True)
class _Shape:
    session: Session
    length_s: float
    gpu_s: float

    @classmethod
    def of(cls, session: Session, profile: SimProfile, wanted: SessionLoad) -> _Shape:
        requests = [one for agent in session_agents(session, 0, wanted.max_gap_s) for one in agent]
        fitting = [one for one in requests if one.input_tokens <= wanted.max_input_tokens]
        length_s = max((one.arrival_s for one in requests), default=0.0)
        return cls(session, length_s, gpu_seconds(fitting, profile, wanted.step_tokens))


def _last_before(agent: Sequence[TraceRequest]) -> Iterator[TraceRequest]:
    """What an agent that goes on after 0 asked last before."""
    for one, after in pairwise(agent):
        if one.arrival_s < 0 <= after.arrival_s:
            yield one


def _spread(
    requests: Sequence[TraceRequest], profile: SimProfile, wanted: SessionLoad
) -> Iterator[TraceRequest]:
    """The longest ago first, each one output token, as far apart as ``WARM_LOAD`` of the fleet needs."""
    at_s = 0.0
    for one in sorted(requests, key=lambda one: one.arrival_s):
        yield replace(one, arrival_s=at_s, output_tokens=1)
        at_s += _prefill_s(one, 0, profile, wanted.step_tokens) / (WARM_LOAD * wanted.workers)
