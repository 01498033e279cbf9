# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import io
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import pytest
from decision_questions import (
    PROFILE,
    SETTINGS,
    Scribe,
    extended_question,
    planner_with,
    random_question,
)

from router.cli import EXIT_OK, EXIT_USAGE, run
from router.costs.model import CostModel
from router.decisions.inputs import DecisionInputs, PlanSettings
from router.decisions.lines import decision_line, outcome_line
from router.decisions.what_if.logged import Unusable, decisions, lines_of, pieces
from router.decisions.what_if.redecide import Redecider, redecide_pieces
from router.decisions.what_if.settings import Changes
from router.plan.candidate import Candidate, Question, Residence, Source
from router.plan.policies import RoundRobin

from .test_inputs import learnt

B = 16
HELD = Residence(ram=((0, 500),))


def scribble(questions: Sequence[Question], scribe: Scribe | None = None) -> list[bytes]:
    scribe = scribe or Scribe()
    return [decision_line(scribe.record(one, f"r{i}")) + b"\n" for i, one in enumerate(questions)]


def drawn(count: int, **options: Any) -> list[Question]:
    random = Random(11)
    return [random_question(random, **options) for _ in range(count)]


def pull_or_compute() -> Question:
    """The holder is busy for a second; pulling from it takes 0.2 s, computing half a second."""
    holder = Candidate("holder", 0, B, 1, [HELD], 5.0, 0, can_pull=True)
    idle = Candidate("idle", 0, B, 1, [Residence()], 0.0, 0, can_pull=True, sessions=frozenset({"holder"}))
    return Question([8000], [holder, idle], [Source("holder", 0, "h", 1, HELD, 0)])


def what_if(
    lines: Sequence[bytes], tmp_path: Path, capsys: pytest.CaptureFixture[str], *arguments: str
) -> dict[str, Any]:
    path = tmp_path / "log"
    path.write_bytes(b"".join(lines))
    assert run(["what-if", str(path), "--json", *arguments]) == EXIT_OK
    document: dict[str, Any] = json.loads(capsys.readouterr().out)
    return document


@pytest.mark.parametrize(
    "kind", ["one profile", "learnt", "idle", "several prompts", "one candidate", "forty", "extended"]
)
def test_nothing_flips_where_nothing_is_changed(kind: str) -> None:
    questions = {
        "one profile": drawn(60),
        "learnt": drawn(60),
        "idle": drawn(60, idle=True),
        "several prompts": drawn(40, prompts=3),
        "one candidate": drawn(20, candidates=1),
        "forty": drawn(10, candidates=40),
        "extended": [extended_question(Random(seed), idle=True) for seed in range(40)],
    }[kind]
    costs = learnt(8) if kind == "learnt" else CostModel(PROFILE)
    tally = Redecider(Changes(), 10).run(scribble(questions, Scribe(costs=costs)))
    assert (tally.decisions, tally.redecided, tally.flips) == (len(questions), len(questions), 0)
    assert tally.before() == tally.after()
    assert tally.truncated == (10 if kind == "forty" else 0)


def test_a_pull_from_several_sources_costs_what_it_was_predicted_to() -> None:
    """Without peers the recorded choice is no longer one of the plans, so that it is priced by its blocks."""
    scribe = Scribe()
    questions = [extended_question(Random(seed), idle=True) for seed in range(60)]
    questions = [one for one in questions if len(scribe.decide(one).planned.chosen.pulls) > 1]
    assert len(questions) > 3
    tally = Redecider(Changes(use_peers=False), 100).run(scribble(questions))
    assert tally.flips == len(questions)
    for flip in tally.largest:
        assert len(flip.before.sources) > 1
        assert flip.before.total_s == pytest.approx(flip.recorded_s, rel=1e-5)


def test_native_and_python_decide_alike() -> None:
    lines = scribble(drawn(80), Scribe(costs=learnt(8)))
    changes = Changes(constants={"prefill_s_per_token": 2e-5, "peer_lookup_s": 0.05})
    native = Redecider(changes, 100).run(lines)
    # Named, the same policy is asked in Python for every question.
    questions = drawn(80)
    scribe = Scribe(costs=CostModel(msgspec.structs.replace(PROFILE, **changes.constants)))
    assert native.flips > 10
    assert native.redecided == len(questions)
    plain = Redecider(changes, 100).run(scribble(questions))
    expected = sum(scribe.decide(one).planned.chosen.terms.total_s for one in questions)
    assert plain.after().seconds == pytest.approx(expected, rel=1e-6)


def test_a_flip_is_shown_with_what_it_wins_by_the_new_constants(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = scribble([pull_or_compute()])
    result = what_if(lines, tmp_path, capsys, "--set", "costs.peer_lookup_s=1.5")
    assert (result["decisions"], result["flips"], result["moved_to_another_worker"]) == (1, 1, 0)
    [flip] = result["largest_flips"]
    assert (flip["id"], flip["before"]["worker"], flip["after"]["worker"]) == ("r0", "idle", "idle")
    assert (flip["before"]["source"], flip["after"]["source"]) == ("holder", None)
    assert flip["before"]["path_blocks"] == {"peer": 500}
    assert flip["after"]["path_blocks"] == {"recompute": 500}
    slow = CostModel(msgspec.structs.replace(PROFILE, peer_lookup_s=1.5))
    seconds = slow.path_seconds(8000)
    assert flip["before"]["seconds"] == pytest.approx(seconds["peer"])
    assert flip["after"]["seconds"] == pytest.approx(seconds["recompute"])
    assert flip["won_s"] == pytest.approx(seconds["peer"] - seconds["recompute"])
    figures = result["figures"]
    assert figures["pulled_bytes"] == {"before": 8000 * 131072, "after": 0, "won": 8000 * 131072}
    assert figures["promoted_bytes"]["won"] == 8000 * 131072
    assert figures["seconds"]["won"] == pytest.approx(flip["won_s"])
    assert figures["gpu_s"]["won"] < 0
    assert result["tokens_by_path"]["peer"] == {"before": 8000, "after": 0, "won": 8000}


@pytest.mark.parametrize(
    "setting",
    [
        "plan.pull_deadline_s=0.001",
        "plan.min_pull_tokens=9000",
        "plan.use_peers=false",
        "costs.peer_bytes_per_s=1e6",
    ],
)
def test_a_pull_that_is_no_longer_allowed_or_too_slow_flips(
    setting: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result = what_if(scribble([pull_or_compute()]), tmp_path, capsys, "--set", setting)
    [flip] = result["largest_flips"]
    assert flip["after"]["source"] is None
    # Giving up a pull that still is the fastest costs time.
    assert (flip["won_s"] > 0) == setting.startswith("costs")


def test_the_weight_of_gpu_seconds_is_weighed_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    busy = Candidate("busy", 0, B, 1, [Residence(hbm=((0, 500),))], 0.7, 0)
    idle = Candidate("idle", 0, B, 1, [Residence()], 0.0, 0)
    lines = scribble([Question([8000], [busy, idle])])
    assert what_if(lines, tmp_path, capsys)["flips"] == 0
    result = what_if(lines, tmp_path, capsys, "--set", "plan.gpu_seconds_weight=9")
    [flip] = result["largest_flips"]
    assert (flip["before"]["worker"], flip["after"]["worker"]) == ("idle", "busy")
    assert flip["before"]["gpu_s"] > flip["after"]["gpu_s"]
    assert flip["won_s"] < 0
    assert result["moved_to_another_worker"] == 1


def test_what_was_learnt_counts_unless_it_is_replaced() -> None:
    lines = scribble(drawn(60), Scribe(costs=learnt(8)))
    assert Redecider(Changes(), 10).run(lines).flips == 0
    profile = {name: getattr(PROFILE, name) for name in ("prefill_start_s", "prefill_s_per_token", "admit_s")}
    assert Redecider(Changes(constants=profile), 10).run(lines).flips > 0


@pytest.mark.parametrize(
    "policy", ["round_robin", "least_load", "longest_prefix", "cache_aware", "fixed_credits"]
)
def test_other_policies_decide_from_the_inputs(
    policy: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = scribble(drawn(60))
    result = what_if(lines, tmp_path, capsys, "--policy", policy)
    assert result["redecided"] == 60
    assert result["flips"] > 10
    assert result["figures"]["seconds"]["won"] < 0, "ours is predicted to be the fastest by its own costs"


def test_policies_that_look_at_capacity_are_told_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = scribble(drawn(20))
    result = what_if(lines, tmp_path, capsys, "--policy", "fixed_pull", "--kv-capacity-tokens", "100000")
    assert result["redecided"] == 20
    assert run(["what-if", str(tmp_path / "log"), "--policy", "fixed_pull"]) == EXIT_USAGE
    assert "--kv-capacity-tokens" in capsys.readouterr().err


def test_decisions_of_policies_that_ignore_costs_stay_as_they_are_unless_another_is_asked() -> None:
    lines = scribble(drawn(12), Scribe(policy=RoundRobin(planner_with(CostModel(PROFILE)))))
    kept = Redecider(Changes(constants={"admit_s": 3.0}), 10).run(lines)
    assert (kept.redecided, dict(kept.skipped)) == (0, {"policy round_robin does not look at costs": 12})
    asked = Redecider(Changes(policy="kv_aware"), 10).run(lines)
    assert asked.redecided == 12
    assert asked.before().seconds > asked.after().seconds


def test_trials_are_left_as_they_are() -> None:
    scribe = Scribe()
    record = scribe.record(pull_or_compute())
    record.trial = True
    tally = Redecider(Changes(constants={"peer_lookup_s": 9.0}), 10).run([decision_line(record)])
    assert dict(tally.skipped) == {"trials": 1}


def test_lines_that_are_no_use_are_counted_and_the_rest_is_decided() -> None:
    scribe = Scribe()
    record = scribe.record(pull_or_compute())
    good = decision_line(record) + b"\n"
    other = good.replace(b'"inputs":["', b'"inputs":["x')
    lines = [good, good[:300], b"rubbish\n", b"\n", outcome_line(record, 1.0) + b"\n", other]
    tally = Redecider(Changes(), 10).run(lines)
    assert (tally.decisions, tally.redecided) == (1, 1)
    assert (tally.unusable.unreadable, tally.unusable.other_version) == (2, 1)


def test_inputs_of_another_shape_are_another_version_and_not_a_torn_line() -> None:
    good = decision_line(Scribe().record(pull_or_compute()))
    start = good.index(b'"inputs":[')
    shape = good[:start] + b'"inputs":["0badcafe",1,2,3]}}'
    unusable = Unusable()
    assert list(decisions([shape], unusable)) == []
    assert (unusable.unreadable, unusable.other_version) == (0, 1)


def test_inputs_from_before_room_was_counted_are_decided_as_they_were() -> None:
    record = Scribe().record(pull_or_compute())
    line = json.loads(decision_line(record))
    inputs = line["record"]["inputs"]
    inputs[0] = "ec32e865"
    inputs[-1] = [candidate[:-3] for candidate in inputs[-1]]
    unusable = Unusable()
    [read] = decisions([json.dumps(line, separators=(",", ":")).encode()], unusable)
    assert read.inputs is not None
    assert isinstance(record.inputs, msgspec.Raw)
    assert read.inputs.candidates == msgspec.json.decode(record.inputs, type=DecisionInputs).candidates
    assert unusable == Unusable()


def test_pieces_of_any_size_hold_every_line_once(tmp_path: Path) -> None:
    lines = scribble(drawn(30))
    (tmp_path / "log.1").write_bytes(b"".join(lines[:11]))
    (tmp_path / "log").write_bytes(b"".join(lines[11:]))
    files = [tmp_path / "log.1", tmp_path / "log"]
    for size in (97, 777, len(lines[0]), 10_000, 10**9):
        assert [line for piece in pieces(files, size) for line in lines_of(piece)] == lines


def test_several_processes_come_to_the_same_sums(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(b"".join(scribble(drawn(60))))
    changes = Changes(constants={"prefill_s_per_token": 2e-5})
    one = redecide_pieces(pieces([path], 40_000), changes, 5, processes=1)
    two = redecide_pieces(pieces([path], 40_000), changes, 5, processes=2)
    assert one.flips == two.flips > 0
    assert one.largest == two.largest
    assert two.after().seconds == pytest.approx(one.after().seconds)
    assert two.before().tokens == one.before().tokens


def test_the_settings_of_each_decision_hold_where_they_are_not_changed() -> None:
    strict = PlanSettings(SETTINGS.gpu_seconds_weight, pull_deadline_s=0.01, min_pull_tokens=0)
    lines = scribble([pull_or_compute()]) + scribble([pull_or_compute()], Scribe(settings=strict))
    assert Redecider(Changes(), 10).run(lines).flips == 0
    assert Redecider(Changes(settings={"pull_deadline_s": 5.0}), 10).run(lines).flips == 1


def test_standard_input_is_a_log_too(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = b"".join(scribble(drawn(3)))
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(lines)))
    assert run(["what-if", "-"]) == EXIT_OK
    assert "3 decisions, 3 decided again" in capsys.readouterr().out


def test_the_table_names_the_largest_flips(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "log"
    path.write_bytes(b"".join(scribble([pull_or_compute()])))
    assert run(["what-if", str(path), "--set", "costs.peer_lookup_s=1.5"]) == EXIT_OK
    text = capsys.readouterr().out
    assert "1 flips (100.00%), 0 of them to another worker" in text
    assert "before idle peer:500 from holder" in text
    assert "after  idle recompute:500" in text


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--set", "costs.nonsense=1"], ["costs.nonsense", "costs.peer_lookup_s"]),
        (["--set", "costs.admit_s"], ["costs.admit_s", "KEY=VALUE"]),
        (["--set", "costs.admit_s=0"], ["costs.admit_s", "above 0"]),
        (["--set", "costs.admit_s=nan"], ["costs.admit_s", "above 0"]),
        (["--set", "plan.min_pull_tokens=many"], ["plan.min_pull_tokens", "many"]),
        (["--set", "plan.use_peers=maybe"], ["plan.use_peers", "true or false"]),
        (["--set", "costs.profile=nobody"], ["nobody", "default"]),
        (["--policy", "magic"], ["--policy", "magic", "kv_aware"]),
        (["--flips", "-1"], ["--flips", "-1"]),
        (["--processes", "0"], ["--processes", "0"]),
    ],
)
def test_what_cannot_be_asked_is_named_with_what_can(
    arguments: list[str], named: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "log").write_bytes(b"")
    assert run(["what-if", str(tmp_path / "log"), *arguments]) == EXIT_USAGE
    message = capsys.readouterr().err
    assert all(word in message for word in named)


def test_a_log_that_is_not_there_is_bad_usage(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["what-if", str(tmp_path / "nowhere")]) == EXIT_USAGE
    assert "nowhere" in capsys.readouterr().err
