# SPDX-License-Identifier: Apache-2.0
"""The lines of the decision log, and how they are read again.

One JSON object per line, told apart by ``type``:

    decision   {"type":"decision","record":{...}}: written when the decision is made
    outcome    {"type":"outcome","id":...,"attempt":...,"observed":{...}}: written when the attempt is over, and once
               more when an engine extension reports later
    dropped    {"type":"dropped","lines":n}: n lines before it could not be kept

The two of one attempt are joined by (id, attempt); where a process died in between, there is no outcome. Writing the
decision at once is what makes it survive the death of the process while the answer is on its way.

A log is a file and its rotated ones, ``PATH.1``, ``PATH.2`` and so on, the highest the newest, all older than
``PATH``. A line that a kill or a full disk has torn is skipped by readers and counted.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec

from router.decisions.record import DecisionRecord, Observation
from router.errors import ConfigError


class DecisionLine(msgspec.Struct, tag_field="type", tag="decision", frozen=True):
    """A decision; what is observed of it is not known yet."""

    record: DecisionRecord


class OutcomeLine(msgspec.Struct, tag_field="type", tag="outcome", frozen=True):
    """What became of an attempt."""

    id: str
    attempt: int
    time_unix_s: float
    observed: Observation
    prefill_observed: Observation | None = None
    """Of the prefill leg of a split request."""


class DroppedLine(msgspec.Struct, tag_field="type", tag="dropped", frozen=True):
    """Lines that could not be kept: the disk took nothing for too long."""

    lines: int


Line = DecisionLine | OutcomeLine | DroppedLine

_ROTATED = r"\.(\d+)"
_OF_PROCESS = r"\.p(\d+)(?:\.\d+)?"

_encode = msgspec.json.Encoder().encode
_decoder = msgspec.json.Decoder(Line)


def decision_line(record: DecisionRecord) -> bytes:
    """Without the line feed."""
    return _encode(DecisionLine(record))


def outcome_line(record: DecisionRecord, time_unix_s: float) -> bytes:
    """Without the line feed."""
    prefill = record.prefill.observed if record.prefill else None
    return _encode(OutcomeLine(record.id, record.attempt, time_unix_s, record.observed, prefill))


def dropped_line(lines: int) -> bytes:
    """Without the line feed."""
    return _encode(DroppedLine(lines))


def log_files(path: Path) -> list[Path]:
    """The files of the log at ``path``, oldest first; those of each process of several after one another.

    Raises:
        ConfigError: there is none.
    """
    files = _files_of_one(path)
    for process in sorted(_numbered(path, _OF_PROCESS)):
        files += _files_of_one(file_of_process(path, process))
    if not files:
        raise ConfigError("LOG", str(path), "the path of a decision log")
    return files


def rotated_files(path: Path) -> dict[int, Path]:
    """By number; the highest is the newest."""
    found = _numbered(path, _ROTATED)
    return {number: path.with_name(f"{path.name}.{number}") for number in found}


def file_of_process(path: Path, process: int) -> Path:
    """Where one of several processes writes: each has a file of its own, so lines are never mixed."""
    return path.with_name(f"{path.name}.p{process}")


def _files_of_one(path: Path) -> list[Path]:
    rotated = rotated_files(path)
    return [*(rotated[number] for number in sorted(rotated)), *([path] if path.is_file() else ())]


def _numbered(path: Path, ending: str) -> set[int]:
    pattern = re.compile(re.escape(path.name) + ending)
    siblings = path.parent.iterdir() if path.parent.is_dir() else ()
    return {int(match[1]) for one in siblings if (match := pattern.fullmatch(one.name))}


class Joined:
    """Decisions of a log with their outcomes. Memory: all of them."""

    def __init__(self) -> None:
        self.records: dict[tuple[str, int], DecisionRecord] = {}
        self.finished: set[tuple[str, int]] = set()
        """Those whose outcome is known."""
        self.unreadable = 0
        self.dropped = 0

    def add(self, line: bytes) -> None:
        try:
            read = _decoder.decode(line)
        except msgspec.DecodeError:
            self.unreadable += 1
            return
        if isinstance(read, DecisionLine):
            self.records[read.record.id, read.record.attempt] = read.record
        elif isinstance(read, DroppedLine):
            self.dropped += read.lines
        elif (record := self.records.get((read.id, read.attempt))) is not None:
            record.observed = read.observed
            if record.prefill is not None and read.prefill_observed is not None:
                record.prefill.observed = read.prefill_observed
            self.finished.add((read.id, read.attempt))


def read_joined(files: Iterable[Path]) -> Joined:
    """The decisions of these files, which come oldest first."""
    joined = Joined()
    for line in _lines(files):
        joined.add(line)
    return joined


def _lines(files: Iterable[Path]) -> Iterator[bytes]:
    for file in files:
        with file.open("rb") as opened:
            for line in opened:
                if stripped := line.strip():
                    yield stripped
