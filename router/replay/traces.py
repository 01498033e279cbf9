# SPDX-License-Identifier: Apache-2.0
"""Traces in Mooncake's form: arrivals, lengths and anonymous block ids, no text.

One JSON object a line (github.com/kvcache-ai/Mooncake, ``FAST25-release/traces``)::

    {"timestamp": 3000, "input_length": 6758, "output_length": 500, "hash_ids": [0, 1, 2, ...]}

``timestamp`` is in milliseconds since the start and binned, so that about ten requests share an instant;
``hash_ids`` has one id per 512 input tokens, the last of which may be partial. An equal id means an equal block
behind an equal prefix.
"""

from __future__ import annotations

import gzip
import hashlib
import itertools
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from router.errors import RouterError

MOONCAKE_BLOCK_TOKENS = 512
DEFAULT_BIN_S = 3.0

_TOKEN_BITS = 17
"""Token ids stay below 131,072, the size of a common vocabulary."""


class TraceError(RouterError):
    """A trace file cannot be read: names the file and the line."""


class TraceRow(msgspec.Struct, frozen=True):
    """One line of a trace file."""

    timestamp: int
    """Milliseconds since the start."""
    input_length: int
    output_length: int
    hash_ids: list[int]


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request to replay. ``block_ids`` includes the last block, which may be partial."""

    arrival_s: float
    input_tokens: int
    output_tokens: int
    block_ids: tuple[int, ...]
    block_size_tokens: int
    index: int
    """Its place in the trace, from 0."""

    @property
    def full_blocks(self) -> int:
        """Blocks of ``block_ids`` that are full, and so can be shared."""
        return self.input_tokens // self.block_size_tokens


def load_trace(path: Path, limit: int | None = None) -> list[TraceRequest]:
    """The first ``limit`` requests of a trace file, plain or gzipped, with their arrivals spread.

    Raises:
        TraceError: the file cannot be read, or a line is not a row of a trace.
    """
    # One row more than asked for tells where the last bin ends.
    rows = list(itertools.islice(read_rows(path), None if limit is None else limit + 1))
    return requests_from_rows(rows)[:limit]


def read_rows(path: Path) -> Iterator[TraceRow]:
    """The rows of a trace file, in its order."""
    decoder = msgspec.json.Decoder(TraceRow)
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as lines:
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    yield _row(decoder, line, f"{path}:{number}")
    except (OSError, EOFError) as error:
        raise TraceError(f"{path}: {error}") from error


def _row(decoder: msgspec.json.Decoder[TraceRow], line: bytes, where: str) -> TraceRow:
    try:
        row = decoder.decode(line)
    except msgspec.DecodeError as error:
        raise TraceError(f"{where}: {error}") from error
    blocks = -(-row.input_length // MOONCAKE_BLOCK_TOKENS)
    if row.input_length < 1 or row.output_length < 0 or len(row.hash_ids) != blocks:
        raise TraceError(
            f"{where}: {len(row.hash_ids)} block ids do not cover {row.input_length} input tokens"
        )
    return row


def requests_from_rows(
    rows: Iterable[TraceRow],
    block_size_tokens: int = MOONCAKE_BLOCK_TOKENS,
    last_bin_s: float = DEFAULT_BIN_S,
) -> list[TraceRequest]:
    """Rows as requests; those of one instant are spread evenly until the next instant.

    ``last_bin_s`` is the width of the last bin, which has no next one. Nothing is random, order is kept.
    """
    bins = [list(group) for _, group in itertools.groupby(rows, key=lambda row: row.timestamp)]
    starts_s = [group[0].timestamp / 1000 for group in bins]
    ends_s = [*starts_s[1:], starts_s[-1] + last_bin_s] if starts_s else []
    requests: list[TraceRequest] = []
    for group, start_s, end_s in zip(bins, starts_s, ends_s, strict=True):
        for place, row in enumerate(group):
            requests.append(
                TraceRequest(
                    arrival_s=start_s + (end_s - start_s) * place / len(group),
                    input_tokens=row.input_length,
                    output_tokens=max(1, row.output_length),
                    block_ids=tuple(row.hash_ids),
                    block_size_tokens=block_size_tokens,
                    index=len(requests),
                )
            )
    return requests


def prompt_tokens(request: TraceRequest) -> array[int]:
    """Token ids of the request's prompt, as an array of u32.

    A full block has the tokens of its id, wherever it stands; a last, partial block has tokens of its own in
    every request, as a partial block is never shared. O(input tokens).
    """
    ids = array("I")
    full = request.full_blocks
    for block_id in request.block_ids[:full]:
        ids.extend(_tokens(b"block", block_id, request.block_size_tokens))
    rest = request.input_tokens - full * request.block_size_tokens
    if rest:
        ids.extend(_tokens(b"tail", request.index, rest))
    return ids


def _tokens(kind: bytes, number: int, count: int) -> array[int]:
    """``count`` ids drawn from a hash of (kind, number)."""
    data = hashlib.shake_128(kind + number.to_bytes(8, "little")).digest(4 * count)
    mask = int.from_bytes(((1 << _TOKEN_BITS) - 1).to_bytes(4, "little") * count, "little")
    ids = array("I")
    ids.frombytes((int.from_bytes(data, "little") & mask).to_bytes(4 * count, "little"))
    return ids


def total_tokens(requests: Sequence[TraceRequest]) -> int:
    """Input tokens of all requests together."""
    return sum(request.input_tokens for request in requests)
