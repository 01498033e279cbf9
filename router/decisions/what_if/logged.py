# SPDX-License-Identifier: Apache-2.0
"""The lines of a log, as far as deciding again needs them, and how the work on them is cut into pieces."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import msgspec

from router.decisions.inputs import READABLE, DecisionInputs

PIECE_BYTES = 16 * 2**20
_DECISION = b'{"type":"decision",'


class LoggedPull(msgspec.Struct, gc=False):
    """Of ``record.PullRecord``."""

    source: str
    start_token: int
    end_token: int
    blocks: int


class LoggedRecord(msgspec.Struct, gc=False):
    """Of ``record.DecisionRecord``."""

    id: str
    attempt: int
    policy: str
    worker: str
    dp_rank: int
    path_blocks: dict[str, int]
    source: str | None
    candidate_count: int
    predicted_ttft_s: float
    inputs: DecisionInputs | None = None
    trial: bool = False
    pulls: tuple[LoggedPull, ...] = ()


class _LoggedDecision(msgspec.Struct, gc=False):
    record: LoggedRecord


class _Layout(msgspec.Struct, array_like=True):
    layout: str


class _LayoutRecord(msgspec.Struct):
    inputs: _Layout | None = None


class _LayoutDecision(msgspec.Struct):
    record: _LayoutRecord


_decoder = msgspec.json.Decoder(_LoggedDecision)
_layout_decoder = msgspec.json.Decoder(_LayoutDecision)


@dataclass(slots=True)
class Unusable:
    """Lines that nothing could be made of."""

    unreadable: int = 0
    """Torn, or no lines of a decision log."""
    other_version: int = 0
    """Decisions of a version with other inputs."""


@dataclass(frozen=True, slots=True)
class Piece:
    """The lines of a file that begin at ``start`` or later and before ``end``."""

    path: Path
    start: int
    end: int


def pieces(files: Iterable[Path], piece_bytes: int = PIECE_BYTES) -> list[Piece]:
    """All of the files, in order."""
    return [
        Piece(file, start, start + piece_bytes)
        for file in files
        for start in range(0, file.stat().st_size, piece_bytes)
    ]


def lines_of(piece: Piece) -> Iterator[bytes]:
    """The lines of a piece; one that begins in it is read to its end."""
    with piece.path.open("rb") as file:
        if piece.start:
            file.seek(piece.start - 1)
            file.readline()
        yield from _until(file, piece.end)


def decisions(lines: Iterable[bytes], unusable: Unusable) -> Iterator[LoggedRecord]:
    """The decisions among the lines; what cannot be used is counted."""
    for line in lines:
        if not line.startswith(_DECISION):
            unusable.unreadable += not (line.isspace() or line.startswith(b'{"type":"'))
            continue
        try:
            record = _decoder.decode(line).record
        except msgspec.DecodeError:
            if _is_other_version(line):
                unusable.other_version += 1
            else:
                unusable.unreadable += 1
            continue
        if record.inputs is not None and record.inputs.layout not in READABLE:
            unusable.other_version += 1
            continue
        yield record


def _until(file: BinaryIO, end: int) -> Iterator[bytes]:
    position = file.tell()
    while position < end and (line := file.readline()):
        position += len(line)
        yield line


def _is_other_version(line: bytes) -> bool:
    try:
        inputs = _layout_decoder.decode(line).record.inputs
    except msgspec.DecodeError:
        return False
    return inputs is not None and inputs.layout not in READABLE
