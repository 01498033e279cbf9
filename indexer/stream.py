# SPDX-License-Identifier: Apache-2.0
"""The state of one event stream (one rank of one worker): order, gaps, replay, incarnation. No I/O, no clock.

Two rules of this file:

* A batch is applied at most once, in the order of its sequence numbers, and never to the wrong incarnation.
* Whatever makes the map incomplete or doubtful leaves as a named action; nothing is lost silently.

vLLM publishes ``[topic, seq, payload]`` with seq counting batches from 0 in each process, keeps the last
``buffer_steps`` batches for replay, and sends no boot id (``vllm/distributed/kv_events.py``). So a new process
shows itself by a sequence that goes backwards, or by a replay whose batch for a sequence we have applied
differs from the one we applied. Every replay therefore starts at the last applied sequence, not after it.

    IDLE ──connected──▶ REPLAYING ──ended/failed──▶ LIVE ──gap, reconnect──▶ REPLAYING
      └─(no replay)──▶ LIVE
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice

from indexer import _core

_REMEMBERED_DIGESTS = 512
_MAX_REPLAYS_PER_GAP = 3


@dataclass(frozen=True, slots=True)
class Apply:
    """Apply this batch to the current incarnation."""

    seq: int
    payload: bytes


@dataclass(frozen=True, slots=True)
class RequestReplay:
    """Ask the replay endpoint for everything from ``start_seq`` on; an older request is void."""

    start_seq: int


@dataclass(frozen=True, slots=True)
class NewIncarnation:
    """The process is another one: nothing it held before counts."""

    reason: str


@dataclass(frozen=True, slots=True)
class MarkPartial:
    """Batches are lost for good: the map of this rank misses blocks, or has some too many."""

    reason: str


@dataclass(frozen=True, slots=True)
class MarkSuspect:
    """It cannot be told whether the process is still the same."""

    reason: str


@dataclass(frozen=True, slots=True)
class ClearSuspect:
    """The process is the same after all."""


Action = Apply | RequestReplay | NewIncarnation | MarkPartial | MarkSuspect | ClearSuspect


class StreamState(enum.Enum):
    """What the stream is doing."""

    IDLE = "idle"
    REPLAYING = "replaying"
    LIVE = "live"


@dataclass(slots=True)
class StreamCounters:
    """Totals since the stream was made."""

    gaps: int = 0
    replays: int = 0
    replay_failures: int = 0
    duplicates: int = 0
    incarnations: int = 0
    overflows: int = 0
    """Live batches dropped because too many arrived during a replay."""


@dataclass(frozen=True, slots=True)
class StreamPosition:
    """Up to where a stream was applied: its newest batch, and by what its process is known again."""

    seq: int
    digest: int
    """Of that batch's payload."""
    process_start_time_s: float | None = None


class EventStream:
    """Feed it what happens; carry out the actions it returns, in order.

    ``max_buffered`` bounds the live batches kept while a replay runs. ``resume``: what was applied up to there is known
    from before, and counts if the process turns out to be the same, as after any reconnect.
    """

    def __init__(
        self,
        *,
        has_replay: bool,
        replay_timeout_s: float = 5.0,
        max_buffered: int = 10_000,
        resume: StreamPosition | None = None,
    ) -> None:
        self.state = StreamState.IDLE
        self.counters = StreamCounters()
        self.next_seq: int | None = None
        self.suspect = False
        self._has_replay = has_replay
        self._replay_timeout_s = replay_timeout_s
        self._max_buffered = max_buffered
        self._buffer: deque[tuple[int, bytes]] = deque()
        self._digests: dict[int, int] = {}
        self._progress = False
        self._last_live: int | None = None
        self._verify_seq: int | None = None
        self._reconnected = False
        self._replay_deadline_s = 0.0
        self._replays_left = _MAX_REPLAYS_PER_GAP
        self._process_start_time_s: float | None = None
        self._restarted = False
        if resume is not None:
            self.next_seq = resume.seq + 1
            self._last_live = resume.seq
            self._digests[resume.seq] = resume.digest
            self._process_start_time_s = resume.process_start_time_s

    def position(self) -> StreamPosition | None:
        """Up to where batches were handed out; None before the first. Between two batches that is what was applied."""
        if not self.next_seq or self.suspect:
            return None
        digest = self._digests.get(self.next_seq - 1)
        if digest is None:
            return None
        return StreamPosition(self.next_seq - 1, digest, self._process_start_time_s)

    def connected(self, now_s: float) -> list[Action]:
        """The subscription is up, for the first time or again."""
        self._reconnected = bool(self.next_seq)
        if self._has_replay:
            self._replays_left = _MAX_REPLAYS_PER_GAP
            return self._start_replay(now_s)
        actions: list[Action] = []
        if self.next_seq is not None and not self.suspect:
            self.suspect = True
            actions.append(MarkSuspect("reconnected, and there is no replay to compare with"))
        self.state = StreamState.LIVE
        return actions

    def disconnected(self) -> list[Action]:
        """The subscription broke; batches published meanwhile are not delivered."""
        self.state = StreamState.IDLE
        self._buffer.clear()
        self._verify_seq = None
        return []

    def live(self, seq: int, payload: bytes, now_s: float) -> list[Action]:
        """A batch from the subscription."""
        if self._last_live is not None and seq <= self._last_live:
            actions = self._restart(f"the sequence went back from {self._last_live} to {seq}")
            self._last_live = seq
            return actions + self._first_of_incarnation(seq, payload, now_s)
        self._last_live = seq
        if self.state is StreamState.REPLAYING:
            self._keep(seq, payload)
            return []
        return self._in_order(seq, payload, now_s)

    def replayed(self, seq: int, payload: bytes, now_s: float) -> list[Action]:
        """A batch from the replay endpoint."""
        if self.state is not StreamState.REPLAYING:
            return []
        self._replay_deadline_s = now_s + self._replay_timeout_s
        if self._verify_seq is None:
            return self._take_replayed(seq, payload, now_s)
        verify_seq, self._verify_seq = self._verify_seq, None
        if seq == verify_seq and self._digests.get(seq) == _digest(payload):
            self._reconnected = False
            return self._trust()
        if seq == verify_seq or self._reconnected:
            return self._other_process(f"replay does not give sequence {verify_seq} as it was applied", now_s)
        return self._take_replayed(seq, payload, now_s)  # same process: the history is just gone

    def take(self, messages: Sequence[tuple[int, bytes]], now_s: float, *, replayed: bool = False) -> int:
        """How many of the first batches just come next: apply these, and give the others to ``live`` or ``replayed``.

        The same as to give each of them there and to find nothing but its ``Apply``, at less cost. O(bytes).
        """
        if self.next_seq is None or (replayed and self._verify_seq is not None):
            return 0
        if self.state is not (StreamState.REPLAYING if replayed else StreamState.LIVE):
            return 0
        if not replayed and self._last_live is not None and self.next_seq <= self._last_live:
            return 0
        first, count = self.next_seq, 0
        for seq, _ in messages:
            if seq != first + count:
                break
            count += 1
        if not count:
            return 0
        self.next_seq = first + count
        self._remember(first, [payload for _, payload in messages[:count]])
        if replayed:
            self._progress = True
            self._replay_deadline_s = now_s + self._replay_timeout_s
        else:
            self._last_live = self.next_seq - 1
        return count

    def replay_ended(self, now_s: float) -> list[Action]:
        """The end marker of the replay arrived."""
        if self.state is not StreamState.REPLAYING:
            return []
        if self._verify_seq is not None and self._reconnected:
            return self._other_process(f"replay no longer has sequence {self._verify_seq}", now_s)
        self._verify_seq = None
        if self.next_seq is None:
            self.next_seq = 0
        return self._go_live(now_s)

    def replay_failed(self, reason: str, now_s: float) -> list[Action]:
        """The replay endpoint did not answer, or answered nonsense."""
        if self.state is not StreamState.REPLAYING:
            return []
        self.counters.replay_failures += 1
        actions: list[Action] = []
        if self._verify_seq is not None and self._reconnected and not self.suspect:
            self.suspect = True
            actions.append(MarkSuspect(f"replay failed: {reason}"))
        self._verify_seq = None
        self._replays_left = 0
        actions.append(MarkPartial(f"replay failed: {reason}"))
        return actions + self._go_live(now_s)

    def tick(self, now_s: float) -> list[Action]:
        """Call now and then: gives up a replay that stalls."""
        if self.state is StreamState.REPLAYING and now_s >= self._replay_deadline_s:
            return self.replay_failed(f"nothing for {self._replay_timeout_s} s", now_s)
        return []

    def process_started(self, start_time_s: float, now_s: float) -> list[Action]:
        """``process_start_time_seconds`` as the worker's metrics show it now."""
        known, self._process_start_time_s = self._process_start_time_s, start_time_s
        already_found, self._restarted = self._restarted, False
        if known is not None and known != start_time_s:
            if already_found and not self.suspect:
                return []  # its stream showed the new process before its metrics did
            actions = self._other_process("process_start_time_seconds changed", now_s)
            self._restarted = False
            return actions
        if known is not None and self.suspect:
            return self._trust()
        return []

    def restarted(self, reason: str, now_s: float) -> list[Action]:
        """Whoever runs the worker says that its process is another one."""
        return self._other_process(reason, now_s)

    def sibling_restarted(self, now_s: float) -> list[Action]:
        """Another rank of the same worker found a new process; the holder is reset by whoever found it."""
        self._forget()
        self._last_live = None
        return self._start_replay(now_s) if self._has_replay and self.state is not StreamState.IDLE else []

    def _in_order(self, seq: int, payload: bytes, now_s: float) -> list[Action]:
        if self.next_seq is not None and seq < self.next_seq:
            return self._repeated(seq, payload, now_s)
        if self._wants_replay(seq):
            actions = self._replay_gap(now_s)
            self._keep(seq, payload)
            return actions
        return self._take(seq, payload)

    def _wants_replay(self, seq: int) -> bool:
        gap = seq > (self.next_seq or 0)
        return gap and self._has_replay and self._replays_left > 0

    def _replay_gap(self, now_s: float) -> list[Action]:
        self._replays_left -= 1
        self.counters.gaps += 1
        return self._start_replay(now_s)

    def _take_replayed(self, seq: int, payload: bytes, now_s: float) -> list[Action]:
        """A hole within a replay is not lost history: the engine's replay socket drops what it cannot queue.

        As long as a replay brings anything new, what it left out is asked for again.
        """
        if self._progress and seq > (self.next_seq or 0):
            self.counters.gaps += 1
            return self._start_replay(now_s)
        self._progress = self._progress or seq >= (self.next_seq or 0)
        return self._take(seq, payload)

    def _repeated(self, seq: int, payload: bytes, now_s: float) -> list[Action]:
        known = self._digests.get(seq)
        if known is None or known == _digest(payload):
            self.counters.duplicates += 1
            return []
        actions = self._restart(f"sequence {seq} came with other bytes")
        return actions + self._first_of_incarnation(seq, payload, now_s)

    def _take(self, seq: int, payload: bytes) -> list[Action]:
        """Apply a batch; what is missing before it is missing for good."""
        actions: list[Action] = []
        expected = 0 if self.next_seq is None else self.next_seq
        if seq < expected:
            self.counters.duplicates += 1
            return actions
        if seq > expected:
            self.counters.gaps += self.state is StreamState.LIVE and not self._has_replay
            actions.append(MarkPartial(f"sequences {expected} to {seq - 1} are lost"))
        self.next_seq = seq + 1
        self._remember(seq, [payload])
        actions.append(Apply(seq, payload))
        return actions

    def _go_live(self, now_s: float) -> list[Action]:
        """Work off what arrived during the replay; a gap in it begins another one."""
        self.state = StreamState.LIVE
        actions: list[Action] = []
        while self._buffer and self.state is StreamState.LIVE:
            if self._wants_replay(self._buffer[0][0]):
                return actions + self._replay_gap(now_s)
            actions += self._in_order(*self._buffer.popleft(), now_s)
        if self.state is StreamState.LIVE:
            self._replays_left = _MAX_REPLAYS_PER_GAP
        return actions

    def _start_replay(self, now_s: float) -> list[Action]:
        self.state = StreamState.REPLAYING
        self.counters.replays += 1
        self._progress = False
        self._verify_seq = None if not self.next_seq else self.next_seq - 1
        self._replay_deadline_s = now_s + self._replay_timeout_s
        return [RequestReplay(self._verify_seq or 0)]

    def _other_process(self, reason: str, now_s: float) -> list[Action]:
        """A new incarnation was found; its history is fetched from the beginning."""
        actions = self._restart(reason, keep_buffer=True)
        self._last_live = self._buffer[-1][0] if self._buffer else None
        if self._has_replay and self.state is not StreamState.IDLE:
            actions += self._start_replay(now_s)
        return actions

    def _first_of_incarnation(self, seq: int, payload: bytes, now_s: float) -> list[Action]:
        if not self._has_replay:
            self.state = StreamState.LIVE
            return self._take(seq, payload)
        actions = self._start_replay(now_s)
        self._keep(seq, payload)
        return actions

    def _restart(self, reason: str, *, keep_buffer: bool = False) -> list[Action]:
        self._forget(keep_buffer=keep_buffer)
        self.counters.incarnations += 1
        return [NewIncarnation(reason)]

    def _forget(self, *, keep_buffer: bool = False) -> None:
        self._restarted = True
        self.next_seq = None
        self.suspect = False
        self._digests.clear()
        self._verify_seq = None
        self._reconnected = False
        self._replays_left = _MAX_REPLAYS_PER_GAP
        if not keep_buffer:
            self._buffer.clear()

    def _trust(self) -> list[Action]:
        if not self.suspect:
            return []
        self.suspect = False
        return [ClearSuspect()]

    def _remember(self, first_seq: int, payloads: Sequence[bytes]) -> None:
        self._digests.update(enumerate(_core.digests(payloads), first_seq))
        too_many = len(self._digests) - _REMEMBERED_DIGESTS
        if too_many > 0:
            for seq in list(islice(self._digests, too_many)):
                del self._digests[seq]

    def _keep(self, seq: int, payload: bytes) -> None:
        if len(self._buffer) == self._max_buffered:
            self._buffer.popleft()
            self.counters.overflows += 1
        self._buffer.append((seq, payload))


def _digest(payload: bytes) -> int:
    return _core.digests([payload])[0]
