# SPDX-License-Identifier: Apache-2.0
"""Any messages in any order: never two answers to one, never anything after an immediate one, never a leak."""

from __future__ import annotations

import os
from collections import Counter
from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from router.errors import NoWorkerAvailable
from router.extproc.messages import (
    Answer,
    BodyMode,
    BodyPiece,
    BodySeen,
    HeadersAnswer,
    HeadersSeen,
    Immediate,
    Message,
    Modes,
    Side,
    TrailersAnswer,
    TrailersSeen,
)
from router.extproc.stream import Ending

from .conftest import GET, OK, POST, SSE, Talk, Told

SIDES = st.sampled_from(Side)
MODES = st.none() | st.builds(Modes, st.sampled_from(BodyMode), st.sampled_from(BodyMode))
DATA = st.sampled_from([b"", b"x", b"{}", b'{"model":"m","prompt":"p"}', b"y" * 70_000, b"data: [DONE]\n\n"])
SUBSETS = st.none() | st.lists(st.sampled_from(["10.0.0.1:8000", "", "10.0.0.9"]), max_size=2)
SERVED = st.sampled_from([None, "10.0.0.1:8000", "10.0.0.2:8000", "10.0.0.3:8000", "?"])
HEADERS = st.builds(
    HeadersSeen,
    SIDES,
    st.sampled_from([(), POST, GET, OK, SSE, ((b":status", b"x"),), (*POST, (b"content-length", b"999999"))]),
    st.booleans(),
    SUBSETS,
    SERVED,
    MODES,
    st.sampled_from([False] * 9 + [True]),
)
MESSAGES = st.lists(
    HEADERS | st.builds(BodySeen, SIDES, DATA, st.booleans(), SUBSETS) | st.builds(TrailersSeen, SIDES),
    max_size=12,
)
ATTEMPTS = st.builds(
    Told,
    insert=st.sampled_from([{}, {"kv_transfer_params": {"n": 1}}]),
    elsewhere=st.sampled_from([(), ("w2",)]),
)
IN_ORDER = st.sampled_from(
    [
        [HeadersSeen(Side.REQUEST, POST, False), BodySeen(Side.REQUEST, b"{}", True)],
        [HeadersSeen(Side.REQUEST, GET, True)],
        [
            HeadersSeen(Side.REQUEST, POST, False),
            BodySeen(Side.REQUEST, b"{", False),
            TrailersSeen(Side.REQUEST),
        ],
    ]
)


class Account:
    """What was asked and answered so far."""

    def __init__(self) -> None:
        self.answered: Counter[tuple[type[Message], Side]] = Counter()
        self.asked: Counter[tuple[type[Message], Side]] = Counter()
        self.sent: dict[Side, bytes] = {Side.REQUEST: b"", Side.RESPONSE: b""}
        self.ended: set[Side] = set()
        self.immediate = False

    def enter(self, message: Message, answers: list[Answer]) -> None:
        self.asked[type(message), message.side] += 1
        for answer in answers:
            assert not self.immediate, "an answer after an immediate one"
            if isinstance(answer, Immediate):
                assert answer is answers[-1]
                self.immediate = True
                continue
            seen = {HeadersAnswer: HeadersSeen, TrailersAnswer: TrailersSeen}.get(type(answer), BodySeen)
            if isinstance(answer, BodyPiece):
                assert answer.side not in self.ended, "a piece after the end"
                assert len(answer.data) <= 62_000
                self.sent[answer.side] += answer.data
                if answer.end_of_stream:
                    self.ended.add(answer.side)
                continue
            self.answered[seen, answer.side] += 1
        for key, count in self.answered.items():
            assert count <= self.asked[key], f"more answers than messages: {key}"
        assert self.answered[HeadersSeen, Side.REQUEST] <= 1
        assert self.answered[HeadersSeen, Side.RESPONSE] <= 1


def run(messages: list[Message], attempt: Told, ending: Ending, refuses: bool) -> None:
    refuse = NoWorkerAvailable("no_workers") if refuses else None
    talk, account = Talk(attempt=attempt, refuse=refuse), Account()
    for message in messages:
        account.enter(message, talk.say(message))
    talk.stream.close(ending, talk.now_s)
    talk.stream.close(Ending.CLOSED, talk.now_s)
    assert talk.say(TrailersSeen(Side.REQUEST)) == []
    assert talk.watched.ended_count <= 1
    assert talk.watched.routed_count <= talk.watched.ended_count
    assert len(attempt.ends) == talk.watched.routed_count
    if attempt.moved is not None:
        assert len(attempt.moved.ends) == 1
    if not attempt.insert and account.sent[Side.REQUEST]:
        asked = b"".join(m.data for m in messages if isinstance(m, BodySeen) and m.side is Side.REQUEST)
        assert asked.startswith(account.sent[Side.REQUEST])
    if account.sent[Side.RESPONSE]:
        came = b"".join(m.data for m in messages if isinstance(m, BodySeen) and m.side is Side.RESPONSE)
        assert came.startswith(account.sent[Side.RESPONSE])


@settings(max_examples=600, deadline=None)
@given(MESSAGES, ATTEMPTS, st.sampled_from(Ending), st.booleans())
def test_messages_in_any_order(messages: list[Message], attempt: Told, ending: Ending, refuses: bool) -> None:
    run(messages, attempt, ending, refuses)


@settings(max_examples=600, deadline=None)
@given(IN_ORDER, MESSAGES, ATTEMPTS, st.sampled_from(Ending))
def test_any_messages_after_a_request_in_order(
    first: list[Message], messages: list[Message], attempt: Told, ending: Ending
) -> None:
    run([*first, *messages], attempt, ending, refuses=False)


def random_message(random: Random) -> Message:
    side = random.choice([Side.REQUEST, Side.RESPONSE])
    end = random.random() < 0.3
    match random.randrange(3):
        case 0:
            fields = random.choice([(), POST, GET, OK, SSE])
            served = random.choice([None, "10.0.0.1:8000", "10.0.0.2:8000"])
            seen = random.choice([None, Modes(random.choice(list(BodyMode)), random.choice(list(BodyMode)))])
            return HeadersSeen(side, fields, end, None, served, seen, random.random() < 0.02)
        case 1:
            return BodySeen(side, random.choice([b"", b"{", b"}", b'{"prompt":"p"}', b"y" * 65_000]), end)
        case _:
            return TrailersSeen(side)


def run_many(count: int, seed: int) -> None:
    """So many messages: half of the streams begin in order, so that they get far."""
    random, said = Random(seed), 0
    while said < count:
        messages: list[Message] = []
        if random.random() < 0.5:
            messages.append(HeadersSeen(Side.REQUEST, POST, False))
            messages += [BodySeen(Side.REQUEST, b"{}", True)] * (random.random() < 0.8)
            messages += [HeadersSeen(Side.RESPONSE, OK, False)] * (random.random() < 0.5)
        messages += [random_message(random) for _ in range(random.randrange(12))]
        insert: dict[str, object] = {"k": 1} if random.random() < 0.3 else {}
        attempt = Told(insert=insert, elsewhere=random.choice([(), ("w2",)]))
        run(messages, attempt, random.choice(list(Ending)), refuses=random.random() < 0.1)
        said += len(messages)


def test_very_many_messages() -> None:
    """POINTSMAN_FUZZ_MESSAGES asks for more than the few that fit into a run of all tests."""
    run_many(int(os.environ.get("POINTSMAN_FUZZ_MESSAGES", "40000")), seed=1)


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=150_000), st.lists(st.integers(0, 150_000), max_size=20), MODES)
def test_a_body_cut_anywhere_comes_back_whole(body: bytes, cuts: list[int], seen: Modes | None) -> None:
    talk = Talk(modes=None if seen is None else Modes(BodyMode.DUPLEX, seen.response))
    talk.headers()
    answers: list[Answer] = []
    edges = sorted({0, len(body), *(cut for cut in cuts if cut < len(body))})
    for start, end in zip(edges, [*edges[1:], len(body)], strict=True):
        answers += talk.body(body[start:end], end=start == len(body))
    account = Account()
    account.asked[HeadersSeen, Side.REQUEST] = 1
    account.enter(BodySeen(Side.REQUEST, b"", True), answers)
    assert account.sent[Side.REQUEST] == body
    assert account.ended == {Side.REQUEST}
    assert isinstance(answers[0], HeadersAnswer)
    assert talk.wanted_bodies == [body]
