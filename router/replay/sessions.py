# SPDX-License-Identifier: Apache-2.0
"""Recorded agent sessions in the form of kv-cache-tester: one session a line, each request with its block ids.

github.com/callanjfox/kv-cache-tester, ``traces/*.json``, or the same with each ``hash_ids`` list as runs::

    {"id": "...", "block_size": 64, "tool_tokens": 9000, "system_tokens": 3000, "requests": [
      {"t": 0.0, "type": "s", "in": 700, "out": 30, "hash_ids": [1, 2, ...]},
      {"t": 9.5, "type": "n", "in": 900, "out": 20, "hash_runs": [[first, count], ...]},
      {"t": 20.0, "type": "subagent", "tool_tokens": ..., "system_tokens": ..., "requests": [...]}]}

Two things are not in the files and are modelled. When sessions begin: a Poisson process. What sessions share: ids
mean nothing across sessions, so half of the tools and system prompt is taken as common to all of them, as
the recorder's own replayer does by default (a warm prefix of 0.5). Within a session the recorded times are
kept, whatever the answers take; only long pauses may be cut.
"""

from __future__ import annotations

import gzip
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import NamedTuple

import msgspec

from router.replay.traces import TraceError, TraceRequest

WARM_SHARE = 0.5

_SHARED = 1 << 62
_SUBAGENT = 1 << 32
"""Shared blocks are numbered from ``_SHARED``; those of subagents, which have other tools, from ``_SUBAGENT`` on."""


class _Request(msgspec.Struct, frozen=True):
    t: float
    type: str
    input_tokens: int = msgspec.field(name="in", default=0)
    output_tokens: int = msgspec.field(name="out", default=0)
    hash_ids: list[int] = []
    hash_runs: list[tuple[int, int]] = []
    tool_tokens: int = 0
    system_tokens: int = 0
    requests: list[_Request] = []

    @property
    def block_ids(self) -> list[int]:
        return self.hash_ids or [first + i for first, count in self.hash_runs for i in range(count)]


class Session(msgspec.Struct, frozen=True):
    """One line of a file."""

    block_size: int
    requests: list[_Request]
    tool_tokens: int = 0
    system_tokens: int = 0


def is_session_file(path: Path) -> bool:
    """Whether the first line of a file is a session; False as well where it cannot be read."""
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as lines:
            first = msgspec.json.decode(next(iter(lines), b""))
    except (OSError, EOFError, msgspec.DecodeError):
        return False
    return isinstance(first, dict) and "requests" in first


def load_sessions(
    path: Path, sessions_per_s: float, seed: int, limit: int | None = None, max_gap_s: float | None = None
) -> list[TraceRequest]:
    """The first ``limit`` requests of all sessions, each begun once, in order of arrival.

    Raises:
        TraceError: the file cannot be read, or a line is not a session.
    """
    random = Random(seed)
    start_s = 0.0
    requests: list[TraceRequest] = []
    for number, session in enumerate(read_sessions(path), start=1):
        for agent in session_agents(session, number, max_gap_s):
            requests.extend(replace(one, arrival_s=start_s + one.arrival_s) for one in agent)
        start_s += random.expovariate(sessions_per_s)
    return in_order(requests)[:limit]


def in_order(requests: Iterable[TraceRequest]) -> list[TraceRequest]:
    """By arrival, numbered anew."""
    ordered = sorted(requests, key=lambda one: one.arrival_s)
    return [replace(one, index=index) for index, one in enumerate(ordered)]


def read_sessions(path: Path) -> Iterator[Session]:
    """The sessions of a file, in its order.

    Raises:
        TraceError: the file cannot be read, or a line is not a session.
    """
    decoder = msgspec.json.Decoder(Session)
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as lines:
            for number, line in enumerate(lines, start=1):
                if not line.strip():
                    continue
                try:
                    yield decoder.decode(line)
                except msgspec.DecodeError as error:
                    raise TraceError(f"{path}:{number}: {error}") from error
    except (OSError, EOFError) as error:
        raise TraceError(f"{path}: {error}") from error


def session_agents(session: Session, number: int, max_gap_s: float | None = None) -> list[list[TraceRequest]]:
    """Requests by agent, those of a subagent apart, at seconds since the session began.

    ``number`` is what tells the blocks of one session from those of all others. A longer gap between two requests
    of an agent is cut to ``max_gap_s``.

    Raises:
        TraceError: a request has too few block ids.
    """
    agents: list[list[TraceRequest]] = []
    _add_agent(agents, session, number, _Place(0.0, _SHARED, session.block_size), max_gap_s)
    return agents


class _Place(NamedTuple):
    """Where an agent begins, and what its shared blocks are called."""

    start_s: float
    shared_from: int
    block_size: int


def _add_agent(
    agents: list[list[TraceRequest]],
    agent: Session | _Request,
    session: int,
    place: _Place,
    max_gap_s: float | None,
) -> None:
    own: list[TraceRequest] = []
    agents.append(own)
    shared = int(WARM_SHARE * (agent.tool_tokens + agent.system_tokens)) // place.block_size
    first: list[int] | None = None
    at_s, last_t = place.start_s, 0.0
    for request in agent.requests:
        gap_s = request.t - last_t
        at_s, last_t = at_s + (gap_s if max_gap_s is None else min(gap_s, max_gap_s)), request.t
        if request.type == "subagent":
            nested = _Place(at_s, _SHARED + _SUBAGENT, place.block_size)
            _add_agent(agents, request, session, nested, max_gap_s)
            continue
        ids = request.block_ids
        if request.input_tokens < 1 or len(ids) < request.input_tokens // place.block_size:
            raise TraceError(
                f"session {session}: {len(ids)} block ids for {request.input_tokens} input tokens"
            )
        first = ids if first is None else first
        common = _common(first, ids, shared)
        blocks = [place.shared_from + i for i in range(common)] + [
            session << 32 | one for one in ids[common:]
        ]
        output_tokens = max(1, request.output_tokens)
        own.append(
            TraceRequest(at_s, request.input_tokens, output_tokens, tuple(blocks), place.block_size, 0)
        )


def _common(first: Sequence[int], ids: Sequence[int], most: int) -> int:
    """Leading blocks, at most ``most``, that are those of the agent's first request."""
    for place, (one, other) in enumerate(zip(first[:most], ids, strict=False)):
        if one != other:
            return place
    return min(most, len(first), len(ids))
