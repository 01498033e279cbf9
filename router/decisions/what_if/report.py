# SPDX-License-Identifier: Apache-2.0
"""The result as a table or as JSON."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from router.decisions.record import path_text
from router.decisions.what_if.choices import Choice
from router.decisions.what_if.tally import PATHS, Flip, Sums, Tally

_FIGURES = {
    "seconds": "predicted s to first token",
    "gpu_s": "GPU seconds of prefill",
    "promoted_bytes": "bytes promoted",
    "pulled_bytes": "bytes pulled from peers",
    "read_bytes": "bytes read from storage",
}


def render_json(tally: Tally) -> str:
    """One object; ``won`` is before minus after, so what is saved is positive."""
    return msgspec.json.encode(document(tally)).decode()


def document(tally: Tally) -> dict[str, object]:
    """The same as plain values."""
    before, after = tally.before(), tally.after()
    return {
        "decisions": tally.decisions,
        "redecided": tally.redecided,
        "skipped": dict(tally.skipped),
        "unreadable_lines": tally.unusable.unreadable,
        "decisions_of_another_version": tally.unusable.other_version,
        "with_candidates_left_out": tally.truncated,
        "flips": tally.flips,
        "moved_to_another_worker": tally.moved,
        "figures": {name: _three(getattr(before, name), getattr(after, name)) for name in _FIGURES},
        "tokens_by_path": {path: _three(before.tokens[path], after.tokens[path]) for path in PATHS},
        "largest_flips": [_flip(flip) for flip in tally.largest],
    }


def render_table(tally: Tally) -> str:
    """For people."""
    before, after = tally.before(), tally.after()
    share = f" ({tally.flips / tally.redecided:.2%})" if tally.redecided else ""
    lines = [
        f"{tally.decisions} decisions, {tally.redecided} decided again",
        f"{tally.flips} flips{share}, {tally.moved} of them to another worker",
        *(f"{count} left as they are: {reason}" for reason, count in sorted(tally.skipped.items())),
        *_remarks(tally),
        "",
        f"{'':<30}{'before':>16}{'after':>16}{'won':>16}",
        *(_row(name, before, after) for name in _FIGURES),
        "",
        f"{'tokens by path':<30}{'before':>16}{'after':>16}{'change':>16}",
        *(_path_row(path, before.tokens[path], after.tokens[path]) for path in PATHS),
    ]
    if tally.largest:
        lines += ["", "largest flips (predicted s to first token, by path in blocks)"]
        for flip in tally.largest:
            lines.append(f"{flip.id} attempt {flip.attempt}: {flip.won_s:+.4f} s won")
            lines += [
                f"    {side} {_words(one)}" for side, one in (("before", flip.before), ("after ", flip.after))
            ]
    return "\n".join(lines)


def _remarks(tally: Tally) -> list[str]:
    unusable = tally.unusable
    remarks = {
        "decisions had more candidates than are kept: others could only choose among the kept": tally.truncated,
        "lines could not be read": unusable.unreadable,
        "decisions were written by another version": unusable.other_version,
    }
    return [f"{count} {text}" for text, count in remarks.items() if count]


def _row(name: str, before: Sums, after: Sums) -> str:
    old, new = getattr(before, name), getattr(after, name)
    digits = 3 if name in {"seconds", "gpu_s"} else 0
    return f"{_FIGURES[name]:<30}{old:>16.{digits}f}{new:>16.{digits}f}{old - new:>+16.{digits}f}"


def _path_row(path: str, before: int, after: int) -> str:
    return f"{path:<30}{before:>16}{after:>16}{after - before:>+16}"


def _three(before: float, after: float) -> Mapping[str, float]:
    return {"before": before, "after": after, "won": before - after}


def _flip(flip: Flip) -> dict[str, object]:
    return {
        "id": flip.id,
        "attempt": flip.attempt,
        "recorded_s": flip.recorded_s,
        "won_s": flip.won_s,
        "before": _choice(flip.before),
        "after": _choice(flip.after),
    }


def _choice(choice: Choice) -> dict[str, object]:
    return {
        "worker": choice.worker,
        "dp_rank": choice.dp_rank,
        "source": choice.sources[0] if choice.sources else None,
        "sources": list(choice.sources),
        "path_blocks": choice.path_blocks,
        "seconds": choice.total_s,
        "gpu_s": choice.gpu_s,
    }


def _words(choice: Choice) -> str:
    source = f" from {' and '.join(choice.sources)}" if choice.sources else ""
    rank = f" rank {choice.dp_rank}" if choice.dp_rank else ""
    return (
        f"{choice.worker}{rank} {path_text(choice.path_blocks) or 'nothing'}{source}: {choice.total_s:.4f} s"
    )
