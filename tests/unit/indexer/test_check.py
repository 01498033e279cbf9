# SPDX-License-Identifier: Apache-2.0
"""The check of recorded streams: each fault is found by name, count and first example, and none where there is none."""

from __future__ import annotations

import base64
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import kv_batches as kv
import pytest

from indexer.check.recording import Recorded
from indexer.check.validator import Fault, Report, Validator
from indexer.identity import Tier
from router.cli import run

GOLDEN = Path(__file__).parents[2] / "golden" / "kv_events"
STREAMS = sorted(path for path in GOLDEN.glob("*.jsonl.gz") if ".requests." not in path.name)


def checked(*messages: bytes | tuple[int, bytes], topic: str = "t") -> Report:
    """The report on messages; those without a number follow the one before."""
    validator, seq = Validator(), -1
    for line, message in enumerate(messages, 1):
        seq, payload = message if isinstance(message, tuple) else (seq + 1, message)
        validator.feed(Recorded(line, topic, seq, payload))
    return validator.report


def found(report: Report) -> dict[Fault, int]:
    return {fault: finding.count for fault, finding in report.faults.items() if finding.count}


def first(report: Report, fault: Fault) -> tuple[int, int, str]:
    example = report.faults[fault].first
    assert example is not None
    return example.line, example.seq, example.text


def write(path: Path, lines: Sequence[Any]) -> str:
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines))
    return str(path)


@pytest.mark.parametrize("path", STREAMS, ids=lambda path: path.name.split(".")[0])
def test_streams_of_real_engines_have_no_fault_and_their_tiers_balance(
    path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["indexer", "check", str(path), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["ok"]
    assert report["messages"] > 0
    assert report["tiers"]["hbm"]["stored"] > 0
    for tier in report["tiers"].values():
        assert tier["stored"] == tier["removed"] + tier["cleared"] + tier["lost"] + tier["held"]


def test_gap_names_what_is_missing_and_counts_once() -> None:
    report = checked(kv.batch(kv.stored([1])), (5, kv.batch(kv.stored([2]))), kv.batch(kv.removed([1])))
    assert found(report) == {Fault.GAP: 1}
    assert first(report, Fault.GAP) == (2, 5, "sequences 1 to 4 are missing")


def test_stream_that_begins_late_has_a_gap_before_it() -> None:
    report = checked((1, kv.batch()))
    assert first(report, Fault.GAP)[2] == "sequence 0 is missing before the first message"


def test_late_and_repeated_messages_are_order_faults_and_a_repeat_counts_no_block_twice() -> None:
    late, again = kv.batch(kv.stored([2])), kv.batch(kv.stored([1]))
    report = checked((0, again), (2, kv.batch()), (1, late), (0, again), (3, kv.batch()))
    # The repeat of 0 is the same bytes, so no new process.
    assert found(report) == {Fault.GAP: 1, Fault.ORDER: 2}
    assert first(report, Fault.ORDER) == (3, 1, "sequence 1 came after 2")
    assert report.tiers[Tier.HBM].held == 2
    assert report.restarts == 0


def test_new_process_is_no_fault_and_its_blocks_begin_anew() -> None:
    report = checked(
        kv.batch(kv.stored([1, 2])), kv.batch(), (0, kv.batch(kv.stored([3]))), kv.batch(kv.removed([1]))
    )
    assert report.restarts == 1
    assert (report.tiers[Tier.HBM].lost, report.tiers[Tier.HBM].held) == (2, 1)
    assert found(report) == {Fault.UNKNOWN_REMOVAL: 1}


def test_sequence_that_comes_with_other_bytes_is_another_process_and_an_order_fault() -> None:
    report = checked(kv.batch(), kv.batch(kv.stored([1])), (1, kv.batch(kv.stored([2]))))
    assert found(report) == {Fault.ORDER: 1}
    assert report.restarts == 1


def test_unknown_parent_is_found_within_its_rank_and_group_only() -> None:
    known = kv.batch(kv.stored([1]), kv.stored([2], parent=1))
    assert found(checked(known)) == {}
    for stranger in (
        kv.batch(kv.stored([2], parent=1), rank=1),
        kv.batch(kv.stored([2], parent=1, group=1)),
        kv.batch(kv.stored([2], parent=7)),
    ):
        report = checked(known, stranger)
        assert found(report) == {Fault.UNKNOWN_PARENT: 1}
        assert "was never stored" in first(report, Fault.UNKNOWN_PARENT)[2]


def test_second_removal_is_told_from_the_removal_of_what_was_never_there() -> None:
    report = checked(kv.batch(kv.stored([1]), kv.removed([1]), kv.removed([1]), kv.removed([9])))
    assert found(report) == {Fault.DOUBLE_REMOVAL: 1, Fault.UNKNOWN_REMOVAL: 1}
    assert first(report, Fault.DOUBLE_REMOVAL) == (
        1,
        0,
        "event 2: block 1 is removed from hbm, where it no longer was",
    )
    assert report.tiers[Tier.HBM].unmatched_removals == 2


def test_references_are_counted_and_tiers_are_apart() -> None:
    twice = [kv.stored([1]), kv.stored([1]), kv.placeholder([1])]
    report = checked(kv.batch(*twice, kv.removed([1]), kv.removed([1]), kv.removed([1], "CPU")))
    assert found(report) == {}
    assert report.tiers[Tier.HBM].stored_again == 1
    assert found(checked(kv.batch(*twice, kv.removed([1], "STORAGE")))) == {Fault.UNKNOWN_REMOVAL: 1}


def test_clearing_empties_hbm_only_and_removals_after_it_are_double() -> None:
    report = checked(kv.batch(kv.stored([1, 2]), kv.placeholder([1]), kv.cleared(), kv.removed([1])))
    assert found(report) == {Fault.DOUBLE_REMOVAL: 1}
    assert (report.tiers[Tier.HBM].cleared, report.tiers[Tier.RAM].held) == (2, 1)


def test_what_cannot_be_read_is_counted_and_the_rest_is_followed() -> None:
    events = [{"type": "BlockStored"}, {"type": "Novel"}, kv.stored([1], medium="TAPE"), kv.stored([1])]
    report = checked(b"\xc1", kv.batch(*events))
    assert found(report) == {
        Fault.MALFORMED_BATCH: 1,
        Fault.MALFORMED_EVENT: 1,
        Fault.UNKNOWN_EVENT: 1,
        Fault.UNKNOWN_MEDIUM: 1,
    }
    assert report.tiers[Tier.HBM].held == 1


def test_topics_have_sequences_and_blocks_of_their_own() -> None:
    validator = Validator()
    validator.feed(Recorded(1, "a", 0, kv.batch(kv.stored([1]))))
    validator.feed(Recorded(2, "b", 0, kv.batch(kv.removed([1]))))
    assert found(validator.report) == {Fault.UNKNOWN_REMOVAL: 1}


def test_command_says_what_is_wrong_and_fails(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    payload = base64.b64encode(kv.batch(kv.removed([b"\xab" * 4]))).decode()
    decoded = [0.0, [kv.stored(["hex:abababab"], kv.tokens_of([1])), kv.removed(["hex:abababab"])]]
    file = write(tmp_path / "s.jsonl", [{"seq": 0, "payload": payload}, "", {"seq": 1, "payload": decoded}])
    assert run(["indexer", "check", file]) == 1
    text = capsys.readouterr().out
    assert (
        "unknown removals        1  first at line 1, sequence 0: event 0: block abababab is removed" in text
    )
    assert "the stream has faults" in text
    assert run(["indexer", "check", file, "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert report["faults"]["unknown_removals"]["count"] == 1
    assert report["tiers"]["hbm"]["stored"] == 1


@pytest.mark.parametrize(
    "line",
    [
        "{",
        "[]",
        '{"seq": 0}',
        '{"seq": -1, "payload": ""}',
        '{"seq": 0, "payload": "!"}',
        '{"seq": 0, "payload": ["hex:x"]}',
    ],
)
def test_file_that_is_no_recording_is_bad_usage_and_the_line_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], line: str
) -> None:
    good = json.dumps({"seq": 0, "payload": base64.b64encode(kv.batch()).decode()})
    assert run(["indexer", "check", write(tmp_path / "s.jsonl", [good, line])]) == 2
    assert "line 2" in capsys.readouterr().err


def test_missing_empty_and_cut_off_files_are_bad_usage(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cut = tmp_path / "cut.gz"
    cut.write_bytes(STREAMS[0].read_bytes()[:-20])
    for file in (tmp_path / "missing", tmp_path, cut, Path(write(tmp_path / "empty", []))):
        assert run(["indexer", "check", str(file)]) == 2
        assert str(file) in capsys.readouterr().err
