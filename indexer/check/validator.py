# SPDX-License-Identifier: Apache-2.0
"""Follows a recorded stream as an index would, and notes what cannot be right. Pure.

A topic is one publisher with one sequence; blocks belong to the rank that a batch names. References are counted per
tier, group and block hash, as the engine may hold one hash twice. A sequence that starts again at 0 is a new process,
which is no fault. Memory: O(blocks and messages).
"""

from __future__ import annotations

import enum
import hashlib
from dataclasses import dataclass, field

from indexer.check.recording import Recorded
from indexer.errors import WireError
from indexer.identity import Tier
from indexer.wire.vllm import Cleared, EngineKey, Event, Removed, Skipped, Stored, decode_batch


class Fault(enum.Enum):
    """What is looked for."""

    ORDER = "order_faults"
    GAP = "gaps"
    UNKNOWN_PARENT = "unknown_parents"
    DOUBLE_REMOVAL = "double_removals"
    UNKNOWN_REMOVAL = "unknown_removals"
    MALFORMED_BATCH = "malformed_batches"
    MALFORMED_EVENT = "malformed_events"
    UNKNOWN_EVENT = "unknown_events"
    UNKNOWN_MEDIUM = "unknown_media"


@dataclass(frozen=True, slots=True)
class Example:
    """Where a fault was first seen, and what it was."""

    line: int
    seq: int
    text: str


@dataclass(slots=True)
class Finding:
    """One kind of fault."""

    count: int = 0
    first: Example | None = None


@dataclass(slots=True)
class Balance:
    """Blocks of one tier: ``stored`` = ``removed`` + ``cleared`` + ``lost`` + ``held``."""

    stored: int = 0
    stored_again: int = 0
    """Of these, blocks that the tier already held."""
    removed: int = 0
    cleared: int = 0
    lost: int = 0
    """Held by a process that was followed by another."""
    held: int = 0
    peak: int = 0
    unmatched_removals: int = 0


@dataclass(slots=True)
class Report:
    """What a recording holds."""

    messages: int = 0
    events: int = 0
    topics: int = 0
    restarts: int = 0
    faults: dict[Fault, Finding] = field(default_factory=lambda: {fault: Finding() for fault in Fault})
    tiers: dict[Tier, Balance] = field(default_factory=lambda: {tier: Balance() for tier in Tier})

    @property
    def ok(self) -> bool:
        return not any(finding.count for finding in self.faults.values())


@dataclass(slots=True)
class _Block:
    held: list[int] = field(default_factory=lambda: [0] * len(Tier))
    stored: list[bool] = field(default_factory=lambda: [False] * len(Tier))


@dataclass(slots=True)
class _Topic:
    highest: int | None = None
    digests: dict[int, bytes] = field(default_factory=dict)
    ranks: dict[int, dict[EngineKey, _Block]] = field(default_factory=dict)


class Validator:
    """Feed it the messages of a recording in order; ``report`` is up to date after each."""

    def __init__(self) -> None:
        self.report = Report()
        self._topics: dict[str, _Topic] = {}

    def feed(self, message: Recorded) -> None:
        """Look at the next message."""
        self.report.messages += 1
        topic = self._topics.setdefault(message.topic, _Topic())
        self.report.topics = len(self._topics)
        if not self._in_order(topic, message):
            return
        try:
            batch = decode_batch(message.payload)
        except WireError as error:
            self._note(Fault.MALFORMED_BATCH, message, str(error))
            return
        blocks = topic.ranks.setdefault(batch.rank or 0, {})
        for number, event in enumerate(batch.events):
            self.report.events += 1
            self._event(message, number, event, blocks)

    def _in_order(self, topic: _Topic, message: Recorded) -> bool:
        """Whether the message is to be applied."""
        seq, digest = message.seq, hashlib.blake2b(message.payload, digest_size=16).digest()
        if topic.highest is None:
            if seq > 0:
                self._note(Fault.GAP, message, f"{_sequences(0, seq)} missing before the first message")
        elif topic.digests.get(seq) == digest:
            self._note(Fault.ORDER, message, f"sequence {seq} came again")
            return False
        elif seq == 0:
            self._restart(topic)
        elif seq in topic.digests:
            self._note(Fault.ORDER, message, f"sequence {seq} came again with other bytes: another process")
            self._restart(topic)
        elif seq < topic.highest:
            self._note(Fault.ORDER, message, f"sequence {seq} came after {topic.highest}")
        elif seq > topic.highest + 1:
            self._note(Fault.GAP, message, f"{_sequences(topic.highest + 1, seq)} missing")
        topic.highest = seq if topic.highest is None else max(topic.highest, seq)
        topic.digests[seq] = digest
        return True

    def _restart(self, topic: _Topic) -> None:
        self.report.restarts += 1
        for blocks in topic.ranks.values():
            for block in blocks.values():
                for tier in Tier:
                    self.report.tiers[tier].lost += block.held[tier]
                    self.report.tiers[tier].held -= block.held[tier]
        topic.highest = None
        topic.digests.clear()
        topic.ranks.clear()

    def _event(self, message: Recorded, number: int, event: Event, blocks: dict[EngineKey, _Block]) -> None:
        where = f"event {number}"
        match event:
            case Stored(tier=None) | Removed(tier=None):
                self._note(Fault.UNKNOWN_MEDIUM, message, f"{where}: a medium that is not known")
            case Stored(tier=Tier() as tier):
                self._stored(message, where, tier, event, blocks)
            case Removed(tier=Tier() as tier, keys=keys):
                for key in keys:
                    self._removed(message, where, tier, key, blocks)
            case Cleared():
                self._cleared(blocks)
            case Skipped.MALFORMED:
                self._note(Fault.MALFORMED_EVENT, message, f"{where} cannot be read")
            case Skipped.UNKNOWN:
                self._note(Fault.UNKNOWN_EVENT, message, f"{where} has a type that is not known")

    def _stored(
        self, message: Recorded, where: str, tier: Tier, event: Stored, blocks: dict[EngineKey, _Block]
    ) -> None:
        if event.parent is not None and event.parent not in blocks:
            text = f"{where}: parent {_name(event.parent)} of a store on {tier.label} was never stored"
            self._note(Fault.UNKNOWN_PARENT, message, text)
        balance = self.report.tiers[tier]
        for key in event.keys:
            block = blocks.setdefault(key, _Block())
            balance.stored += 1
            balance.stored_again += block.held[tier] > 0
            block.held[tier] += 1
            block.stored[tier] = True
        balance.held += len(event.keys)
        balance.peak = max(balance.peak, balance.held)

    def _removed(
        self, message: Recorded, where: str, tier: Tier, key: EngineKey, blocks: dict[EngineKey, _Block]
    ) -> None:
        balance = self.report.tiers[tier]
        block = blocks.get(key)
        if block is not None and block.held[tier]:
            block.held[tier] -= 1
            balance.removed += 1
            balance.held -= 1
            return
        balance.unmatched_removals += 1
        if block is not None and block.stored[tier]:
            text = f"{where}: {_name(key)} is removed from {tier.label}, where it no longer was"
            self._note(Fault.DOUBLE_REMOVAL, message, text)
        else:
            text = f"{where}: {_name(key)} is removed from {tier.label}, where it was never stored"
            self._note(Fault.UNKNOWN_REMOVAL, message, text)

    def _cleared(self, blocks: dict[EngineKey, _Block]) -> None:
        """HBM is empty; RAM may be too, of which no event tells."""
        balance = self.report.tiers[Tier.HBM]
        for block in blocks.values():
            balance.cleared += block.held[Tier.HBM]
            balance.held -= block.held[Tier.HBM]
            block.held[Tier.HBM] = 0

    def _note(self, fault: Fault, message: Recorded, text: str) -> None:
        finding = self.report.faults[fault]
        finding.count += 1
        if finding.first is None:
            finding.first = Example(message.line, message.seq, text)


def _sequences(first: int, end: int) -> str:
    return f"sequence {first} is" if end == first + 1 else f"sequences {first} to {end - 1} are"


def _name(key: EngineKey) -> str:
    group, value = key
    text = value.hex() if isinstance(value, bytes) else str(value)
    return f"block {text}" if group == 0 else f"block {text} of group {group}"
