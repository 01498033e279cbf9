# SPDX-License-Identifier: Apache-2.0
"""What the benchmark says: rows, tables, verdicts. Pure; figures in, text out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

KIB, MIB, GIB = 2**10, 2**20, 2**30

# What must hold where a GPU is available.
CONTIGUOUS_SHARE = 0.9
CONTIGUOUS_FROM_BYTES = 64 * MIB
VLLM_MARGIN = 1.05

CONTIGUOUS, OURS, VLLM = "contiguous", "ours", "vllm"


@dataclass(frozen=True, slots=True)
class Row:
    """One transfer by every contender. Seconds are wall time from the call to the last byte, medians."""

    section: str
    total_bytes: int
    fragment_bytes: int
    descriptors: int
    seconds: Mapping[str, float]
    notes: Mapping[str, str] = field(default_factory=dict)


def size_text(size_bytes: int) -> str:
    for unit, name in ((GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")):
        if size_bytes >= unit and size_bytes % unit == 0:
            return f"{size_bytes // unit} {name}"
    return f"{size_bytes} B"


def time_text(seconds: float) -> str:
    return f"{seconds * 1e6:.1f} us" if seconds < 1e-3 else f"{seconds * 1e3:.2f} ms"


def table(rows: Sequence[Row]) -> str:
    """A Markdown table of one section: per contender the time and the rate."""
    contenders = list(dict.fromkeys(name for row in rows for name in row.seconds))
    notes = list(dict.fromkeys(name for row in rows for name in row.notes))
    lines = [
        "| total | fragment | descriptors | " + " | ".join([*contenders, *notes]) + " |",
        "|---:|---:|---:|" + "---:|" * (len(contenders) + len(notes)),
    ]
    for row in rows:
        cells = [size_text(row.total_bytes), size_text(row.fragment_bytes), f"{row.descriptors}"]
        cells += [_timing(row, name) for name in contenders]
        cells += [row.notes.get(name, "") for name in notes]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _timing(row: Row, name: str) -> str:
    seconds = row.seconds.get(name)
    if seconds is None:
        return "-"
    return f"{time_text(seconds)}, {row.total_bytes / seconds / 1e9:.1f} GB/s"


def verdicts(rows: Sequence[Row]) -> list[tuple[bool, str]]:
    """The promises about promotion, each with whether it held and the worst row. Empty where nothing was measured."""
    found: list[tuple[bool, str]] = []
    large = [
        row
        for row in rows
        if row.total_bytes >= CONTIGUOUS_FROM_BYTES and {CONTIGUOUS, OURS} <= row.seconds.keys()
    ]
    if large:
        worst = min(large, key=lambda row: row.seconds[CONTIGUOUS] / row.seconds[OURS])
        share = worst.seconds[CONTIGUOUS] / worst.seconds[OURS]
        promise = (
            f"at least {CONTIGUOUS_SHARE} of a contiguous copy from {size_text(CONTIGUOUS_FROM_BYTES)} up"
        )
        found.append((share >= CONTIGUOUS_SHARE, f"{promise}: worst {share:.3f}, {_which(worst)}"))
    beside = [row for row in rows if {OURS, VLLM} <= row.seconds.keys()]
    if beside:
        worst = max(beside, key=lambda row: row.seconds[OURS] / row.seconds[VLLM])
        ratio = worst.seconds[OURS] / worst.seconds[VLLM]
        promise = f"at most {VLLM_MARGIN} of the time of vLLM's own transfer at every size"
        found.append((ratio <= VLLM_MARGIN, f"{promise}: worst {ratio:.3f}, {_which(worst)}"))
    return found


def _which(row: Row) -> str:
    return f"{size_text(row.total_bytes)} in fragments of {size_text(row.fragment_bytes)}"
