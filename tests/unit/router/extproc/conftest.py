# SPDX-License-Identifier: Apache-2.0
"""A stream, and attempts that write down what they are told."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from router.errors import RouterError
from router.extproc.messages import (
    Answer,
    BodyMode,
    BodyPiece,
    BodySeen,
    HeadersSeen,
    Message,
    Modes,
    Side,
    TrailersSeen,
)
from router.extproc.picked import Picked, Tally
from router.extproc.stream import PickerStream, StreamSettings
from router.gateway.headers import Headers
from router.gateway.parse import parse_request
from router.gateway.routing import PrefillLeg, Route
from router.request import Outcome, Usage

POST: Headers = ((b":method", b"POST"), (b":path", b"/v1/completions"))
GET: Headers = ((b":method", b"GET"), (b":path", b"/v1/models"))
OK: Headers = ((b":status", b"200"), (b"content-type", b"application/json"))
SSE: Headers = ((b":status", b"200"), (b"content-type", b"text/event-stream"))
LIMIT_BYTES = 200_000


@dataclass
class Told:
    """An attempt at one worker; ``elsewhere``: workers that may serve instead."""

    worker: str = "w1"
    insert: dict[str, object] = field(default_factory=dict)
    elsewhere: tuple[str, ...] = ()
    prefill: PrefillLeg | None = None
    first_bytes: int = 0
    usages: list[Usage] = field(default_factory=list)
    ends: list[tuple[Outcome, int | None]] = field(default_factory=list)
    prefills: list[Outcome] = field(default_factory=list)
    moved: Told | None = None

    @property
    def route(self) -> Route:
        return Route(
            "r1",
            self.worker,
            f"http://{self.worker}",
            self.insert,
            (),
            ((b"x-pointsman-worker", self.worker.encode()),),
            self.prefill,
        )

    def first_byte(self) -> None:
        self.first_bytes += 1

    def usage(self, usage: Usage) -> None:
        self.usages.append(usage)

    def prefill_finished(self, outcome: Outcome, status: int | None, usage: Usage | None) -> None:
        self.prefills.append(outcome)

    def finish(self, outcome: Outcome, status: int | None) -> None:
        assert not self.ends, "finished twice"
        self.ends.append((outcome, status))

    def scores_s(self) -> dict[str, float]:
        return {}

    def fallbacks(self, most: int) -> tuple[str, ...]:
        return self.elsewhere[:most]

    def served_by(self, worker_id: str) -> Told | None:
        if worker_id == self.worker:
            return self
        if worker_id not in self.elsewhere:
            return None
        self.finish(Outcome.WORKER_ERROR, None)
        self.moved = Told(worker_id)
        return self.moved


@dataclass
class Watched:
    """Counts what the observer hears."""

    routed_count: int = 0
    ended_count: int = 0
    last: Tally | None = None

    def routed(self, tally: Tally) -> None:
        self.routed_count += 1

    def ended(self, tally: Tally) -> None:
        self.ended_count += 1
        self.last = tally


@dataclass
class Talk:
    """One stream, driven step by step."""

    modes: Modes | None = None
    attempt: Told = field(default_factory=Told)
    refuse: RouterError | None = None
    limit_bytes: int = LIMIT_BYTES
    tells_served: bool = False
    watched: Watched = field(default_factory=Watched)
    wanted_bodies: list[bytes] = field(default_factory=list)
    subsets: list[Sequence[str] | None] = field(default_factory=list)
    now_s: float = 100.0

    def __post_init__(self) -> None:
        settings = StreamSettings(self.limit_bytes, 1_000_000, tells_served=self.tells_served)
        self.stream = PickerStream(settings, self.watched, self.now_s)

    def say(self, message: Message) -> list[Answer]:
        """Everything that one message brings about, the decision included."""
        self.now_s += 1
        answers = list(self.stream.take(message, self.now_s))
        wanted = self.stream.wanted
        if wanted is None:
            return answers
        assert answers == []
        self.wanted_bodies.append(wanted.body)
        self.subsets.append(wanted.subset)
        if self.refuse is not None:
            return list(self.stream.refused(self.refuse))
        fields = dict(wanted.headers)
        method, path = fields.get(b":method", b"").decode(), fields.get(b":path", b"").decode()
        request = parse_request(method, path, wanted.headers, wanted.body, "r1")
        ports = {f"10.0.0.{name[1:]}:8000": name for name in ("w1", "w2", "w3")}
        named = ",".join(f"10.0.0.{name[1:]}:8000" for name in (self.attempt.worker, *self.attempt.elsewhere))
        picked = Picked(request, self.attempt, named, ((b"x-request-id", b"r1"),), (b"x-secret",), ports.get)
        return list(self.stream.routed(picked, self.now_s))

    def headers(self, headers: Headers = POST, *, end: bool = False, **more: object) -> list[Answer]:
        return self.say(HeadersSeen(Side.REQUEST, headers, end, modes=self.modes, **more))  # type: ignore[arg-type]

    def body(self, data: bytes, *, end: bool = False) -> list[Answer]:
        return self.say(BodySeen(Side.REQUEST, data, end))

    def trailers(self) -> list[Answer]:
        return self.say(TrailersSeen(Side.REQUEST))

    def response(
        self, headers: Headers = OK, *, end: bool = False, served: str | None = None
    ) -> list[Answer]:
        return self.say(HeadersSeen(Side.RESPONSE, headers, end, served=served))

    def response_body(self, data: bytes, *, end: bool = False) -> list[Answer]:
        return self.say(BodySeen(Side.RESPONSE, data, end))

    def response_trailers(self) -> list[Answer]:
        return self.say(TrailersSeen(Side.RESPONSE))


def modes(request: BodyMode, response: BodyMode = BodyMode.DUPLEX) -> Modes:
    return Modes(request, response)


def joined(answers: Sequence[Answer]) -> bytes:
    """The body that pieces make up; checks size and end flag."""
    found = [one for one in answers if isinstance(one, BodyPiece)]
    assert all(len(one.data) <= 62_000 for one in found)
    assert all(not one.end_of_stream for one in found[:-1])
    return b"".join(one.data for one in found)
