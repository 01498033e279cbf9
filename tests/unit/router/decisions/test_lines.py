# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from pathlib import Path
from random import Random

import msgspec
import pytest
from decision_questions import Scribe, random_question

from router.decisions.lines import decision_line, dropped_line, log_files, outcome_line, read_joined
from router.decisions.record import DecisionRecord
from router.errors import ConfigError


def records(count: int) -> list[DecisionRecord]:
    scribe, random = Scribe(), Random(1)
    return [scribe.record(random_question(random), f"r{i}") for i in range(count)]


def test_decisions_and_outcomes_are_joined_over_the_files_of_a_rotated_log(tmp_path: Path) -> None:
    first, second, third = records(3)
    lines = [decision_line(one) for one in (first, second, third)]
    first.observed.ttft_s, third.observed.ttft_s = 0.5, 0.7
    (tmp_path / "log.9").write_bytes(lines[0] + b"\n" + lines[1] + b"\n")
    (tmp_path / "log.10").write_bytes(outcome_line(first, 2.0) + b"\n" + lines[2] + b"\n")
    (tmp_path / "log").write_bytes(outcome_line(third, 3.0) + b"\n")
    (tmp_path / "log.10.gz").write_bytes(b"not ours")
    (tmp_path / "log.old").write_bytes(b"not ours")
    files = log_files(tmp_path / "log")
    assert [one.name for one in files] == ["log.9", "log.10", "log"]
    joined = read_joined(files)
    assert [record.observed.ttft_s for record in joined.records.values()] == [0.5, None, 0.7]
    assert joined.finished == {("r0", 1), ("r2", 1)}
    assert joined.unreadable == 0


def test_a_record_reads_back_as_it_was_written(tmp_path: Path) -> None:
    [record] = records(1)
    (tmp_path / "log").write_bytes(decision_line(record) + b"\n")
    [again] = read_joined([tmp_path / "log"]).records.values()
    assert bytes(again.inputs) == bytes(record.inputs)  # type: ignore[arg-type]
    without = [msgspec.structs.replace(one, inputs=msgspec.UNSET) for one in (record, again)]
    assert without[0] == without[1]


def test_torn_lines_are_skipped_and_counted_and_lost_ones_are_known(tmp_path: Path) -> None:
    one, two = records(2)
    torn = decision_line(one)[:200]
    path = tmp_path / "log"
    path.write_bytes(torn + b"\n" + decision_line(two) + b"\n" + dropped_line(7) + b"\n\n" + torn)
    joined = read_joined([path])
    assert list(joined.records) == [("r1", 1)]
    assert (joined.unreadable, joined.dropped) == (2, 7)


def test_a_log_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nowhere"):
        log_files(tmp_path / "nowhere")
