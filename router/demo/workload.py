# SPDX-License-Identifier: Apache-2.0
"""The demo's traffic: conversations over a few long shared documents, and one burst on one of them. Pure.

Equal arguments give equal workloads, so that every policy is asked the same questions at the same times. The
simulated model takes one token per byte, so lengths in characters are lengths in tokens.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace

_TEXT = (
    "account axle ballast barrier brake buffer bridge cabin carriage catch clause clearance contract coupling "
    "crossing curve deposit depot detector drawbar engine fault ferry freight gauge gradient guard harbour "
    "inspection interval junction lamp ledger lever limit loading lock margin meter notice operator order passage "
    "permit platform plate point pressure rail record relay repair report right route schedule section sector "
    "semaphore shunt siding signal sleeper speed station switch tariff tender terminal timber track traction "
    "train transfer transit truck tunnel turnout valve viaduct wagon warrant weight wheel yard"
)
_WORDS = _TEXT.split()

_INSTRUCTION = "Answer from the document below and from nothing else. Name the section you rely on.\n\n"
_LARGEST_SCALE = 8


@dataclass(frozen=True, slots=True)
class Turn:
    """One question, asked ``pause_s`` after the answer before it (or after the conversation's start)."""

    pause_s: float
    question: str
    max_tokens: int


@dataclass(frozen=True, slots=True)
class Conversation:
    """Turns over one document; times are relative to the start of the workload."""

    start_s: float
    document: int
    turns: tuple[Turn, ...]


@dataclass(frozen=True, slots=True)
class Workload:
    """Documents, and conversations in order of their start."""

    documents: tuple[str, ...]
    conversations: tuple[Conversation, ...]

    @property
    def requests(self) -> int:
        """Requests of all conversations."""
        return sum(len(conversation.turns) for conversation in self.conversations)


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadShape:
    """Knobs of the generator. Counts are per worker, for up to eight workers."""

    documents: int = 3
    document_chars: tuple[int, int] = (8_500, 11_500)
    conversations: int = 7
    turns: tuple[int, int] = (2, 4)
    window_s: float = 6.5
    """Conversations start within it."""
    pause_s: tuple[float, float] = (0.4, 1.2)
    question_chars: tuple[int, int] = (60, 240)
    answer_tokens: tuple[int, int] = (12, 40)
    burst: int = 4
    """Simultaneous requests for the last document, each with a long text of its own."""
    burst_start_s: float = 6.5
    burst_gap_s: float = 0.01
    burst_chars: tuple[int, int] = (1_200, 1_600)


GENTLE = WorkloadShape(conversations=3, window_s=12.0, pause_s=(1.0, 3.0), burst=2, burst_start_s=10.0)
"""What goes on after the table."""


def make_workload(seed: int, workers: int, shape: WorkloadShape | None = None) -> Workload:
    """The workload of a fleet of that many workers."""
    shape = shape or WorkloadShape()
    scale = min(workers, _LARGEST_SCALE)
    documents = make_documents(seed, scale * shape.documents, shape.document_chars)
    return Workload(documents, make_conversations(seed, scale, len(documents), shape))


def endless_workloads(seed: int, workers: int) -> Iterator[Workload]:
    """Gentle workloads, one after the other, over the documents of ``make_workload(seed, workers)``."""
    first = make_workload(seed, workers, GENTLE)
    scale = min(workers, _LARGEST_SCALE)
    for later in range(seed + 1, seed + 1_000_000_000):
        yield replace(first, conversations=make_conversations(later, scale, len(first.documents), GENTLE))


def make_documents(seed: int, count: int, chars: tuple[int, int]) -> tuple[str, ...]:
    """Beginnings of prompts: a common instruction, then a document of its own length."""
    texts = []
    for number in range(count):
        rng = random.Random(f"document {seed} {number}")
        head = f"{_INSTRUCTION}Document {number}\n\n"
        texts.append(head + _prose(rng, rng.randint(*chars) - len(head)))
    return tuple(texts)


def make_conversations(
    seed: int, scale: int, documents: int, shape: WorkloadShape
) -> tuple[Conversation, ...]:
    """Conversations on all documents but the last, the low numbers more often, and the burst on the last.

    One reader opens that document early, so at the burst exactly one worker holds it.
    """
    rng = random.Random(f"conversations {seed}")
    last = documents - 1
    weights = [1 / (rank + 2) for rank in range(last)]
    found = [Conversation(shape.window_s / 4, last, (_turn(rng, shape),))]
    for _ in range(scale * shape.conversations):
        (document,) = rng.choices(range(last), weights)
        turns = tuple(_turn(rng, shape) for _ in range(rng.randint(*shape.turns)))
        found.append(Conversation(rng.uniform(0.0, shape.window_s), document, turns))
    for number in range(scale * shape.burst):
        text = _prose(rng, rng.randint(*shape.burst_chars))
        turn = Turn(0.0, f"Does the document allow this?\n\n{text}", rng.randint(*shape.answer_tokens))
        found.append(Conversation(shape.burst_start_s + number * shape.burst_gap_s, last, (turn,)))
    return tuple(sorted(found, key=lambda conversation: conversation.start_s))


def _turn(rng: random.Random, shape: WorkloadShape) -> Turn:
    question = _prose(rng, rng.randint(*shape.question_chars))
    return Turn(rng.uniform(*shape.pause_s), question, rng.randint(*shape.answer_tokens))


def _prose(rng: random.Random, chars: int) -> str:
    """Sentences of that many characters in all."""
    sentences: list[str] = []
    length = 0
    while length < chars:
        sentence = " ".join(rng.choices(_WORDS, k=rng.randint(6, 14))).capitalize() + ". "
        sentences.append(sentence)
        length += len(sentence)
    return "".join(sentences)[:chars]
