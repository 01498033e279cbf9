# SPDX-License-Identifier: Apache-2.0
"""The findings as text and as JSON values."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

from indexer.check.validator import Report

_COLUMNS = ("stored", "stored_again", "removed", "cleared", "lost", "held", "peak", "unmatched_removals")


def as_json(report: Report) -> dict[str, Any]:
    """``{"ok", "messages", ..., "faults": {name: {"count", "first"}}, "tiers": {name: {...}}}``."""
    return {
        "ok": report.ok,
        "messages": report.messages,
        "events": report.events,
        "topics": report.topics,
        "restarts": report.restarts,
        "faults": {fault.value: asdict(finding) for fault, finding in report.faults.items()},
        "tiers": {tier.label: asdict(balance) for tier, balance in report.tiers.items()},
    }


def as_text(report: Report) -> str:
    """A table of the tiers, a table of the faults with the first of each, and a verdict."""
    parts = [
        f"{report.messages} messages, {report.events} events, {report.topics} topics, {report.restarts} restarts",
        "",
        *_table(
            [
                ["tier", *_COLUMNS],
                *([tier.label, *_numbers(asdict(balance))] for tier, balance in report.tiers.items()),
            ]
        ),
        "",
    ]
    for fault, finding in report.faults.items():
        parts.append(f"{fault.value.replace('_', ' '):<18}{finding.count:>7}")
        if finding.first is not None:
            first = finding.first
            parts[-1] += f"  first at line {first.line}, sequence {first.seq}: {first.text}"
    return "\n".join([*parts, "", "no faults" if report.ok else "the stream has faults"])


def _numbers(balance: dict[str, int]) -> Iterable[str]:
    return (str(balance[name]) for name in _COLUMNS)


def _table(lines: list[list[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return [
        "  ".join(
            [
                line[0].ljust(widths[0]),
                *(cell.rjust(width) for cell, width in zip(line[1:], widths[1:], strict=True)),
            ]
        ).replace("_", " ")
        for line in lines
    ]
