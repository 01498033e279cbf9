# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import dataclasses
from dataclasses import replace
from random import Random

import msgspec
import pytest
from decision_questions import PROFILE, SETTINGS, Scribe, extended_question, planner_with, random_question

from router.costs.calibration import Calibration
from router.costs.model import CostModel, Costs
from router.costs.observation import Observation
from router.decisions.constants import ConstantsRows, RowReader, constants_id
from router.decisions.inputs import (
    DecisionInputs,
    best_candidates,
    costs_of,
    inputs_of,
    inputs_view,
    question_of,
)
from router.plan.candidate import Candidate, Question, Source


def through_json(inputs: DecisionInputs) -> DecisionInputs:
    return msgspec.json.decode(msgspec.json.encode(inputs), type=DecisionInputs)


def kept(question: Question, costs: Costs) -> DecisionInputs:
    planned = planner_with(costs).plan(question, Random(0))
    return through_json(
        inputs_of(question, best_candidates(question, planned.ranking), ConstantsRows(costs), SETTINGS)
    )


def learnt(workers: int) -> Calibration:
    """Every worker and some links have constants of their own."""
    calibration, random = Calibration(PROFILE), Random(3)
    for i in range(20 * workers):
        worker, source = f"w{i % workers}", f"w{random.randrange(workers)}"
        pulls = random.random() < 0.5 and source != worker
        seen = Observation(
            worker=worker,
            source=source if pulls else None,
            prompt_tokens=4000,
            ram_tokens=0 if pulls else 1600,
            peer_tokens=1600 if pulls else 0,
            storage_tokens=0,
            planned_cached_tokens=1600,
            cached_tokens=1600,
            decodes=1,
            other_pulls=0,
            connected=True,
            queue_s=0.0,
            ttft_s=0.1 + 0.05 * (i % workers) + random.random() / 50,
        )
        calibration.observe(seen, float(i))
    return calibration


@pytest.mark.parametrize("extended", [False, True])
@pytest.mark.parametrize("seed", range(40))
def test_a_decision_made_again_from_its_inputs_is_the_same(seed: int, extended: bool) -> None:
    random = Random(seed)
    costs: Costs = learnt(8) if seed % 2 else CostModel(PROFILE)
    if extended:
        question = extended_question(random)
    else:
        question = random_question(
            random, candidates=random.choice([1, 3, 8]), prompts=random.choice([1, 1, 2])
        )
    before = planner_with(costs).plan(question, Random(0)).chosen
    inputs = kept(question, costs)
    after = planner_with(costs_of(inputs, RowReader())).plan(question_of(inputs), Random(0)).chosen
    assert (after.worker, after.dp_rank) == (before.worker, before.dp_rank)
    assert after.path_blocks == before.path_blocks
    assert (after.source and after.source.worker) == (before.source and before.source.worker)
    assert after.max_load_tokens == before.max_load_tokens
    assert after.source_workers == before.source_workers
    assert [one.start_block for one in after.pulls] == [one.start_block for one in before.pulls]
    # Constants are kept to seven digits.
    assert after.score_s == pytest.approx(before.score_s, rel=1e-6)


def test_the_best_sixteen_and_the_sources_that_were_tried_are_kept() -> None:
    question = random_question(Random(1), candidates=60)
    planned = planner_with(CostModel(PROFILE)).plan(question, Random(0))
    inputs = kept(question, CostModel(PROFILE))
    assert [one.worker for one in inputs.candidates] == [plan.worker for plan in planned.ranking[:16]]
    assert len(inputs.sources) == 4
    used = {plan.source.worker for plan in planned.ranking if plan.source}
    assert used <= {one.worker for one in inputs.sources}


def test_every_field_of_the_question_survives_but_addresses_and_what_only_trials_need() -> None:
    question = random_question(Random(7))
    planned = planner_with(CostModel(PROFILE)).plan(question, Random(0))
    again = question_of(kept(question, CostModel(PROFILE)))
    by_worker = {one.worker: one for one in question.candidates}
    names = {one.worker for one in again.sources}
    assert [one.worker for one in again.candidates] == [plan.worker for plan in planned.ranking]
    for one in again.candidates:
        original = by_worker[one.worker]
        assert one == replace(original, sessions=original.sessions & names)
    assert list(again.sources) == [replace(one, host="", port=0) for one in question.sources]
    alike = {field.name for field in dataclasses.fields(Question)} - {"candidates", "sources", "explore"}
    for name in alike:
        value, original = getattr(again, name), getattr(question, name)
        assert (list(value) if name == "prompt_tokens" else value) == original, name
    # What is drawn has no field left at its default by accident.
    assert {field.name for field in dataclasses.fields(Candidate)} == set(Candidate.__slots__)
    assert any(one.trust != 1.0 for one in question.candidates)
    assert {one.fingerprint for one in question.candidates} == {"fp8", "bf16"}


def test_no_address_and_no_token_is_kept() -> None:
    question = random_question(Random(2))
    question = replace(
        question, sources=[replace(one, host="10.9.8.7", port=61234) for one in question.sources]
    )
    text = msgspec.json.encode(kept(question, CostModel(PROFILE)))
    assert b"10.9.8.7" not in text
    assert b"61234" not in text


def test_constants_of_one_worker_are_written_once_and_those_of_each_learnt_worker_with_it() -> None:
    question = random_question(Random(2))
    assert len(kept(question, CostModel(PROFILE)).constants) == 1
    calibration = learnt(8)
    inputs = kept(question, calibration)
    assert len(inputs.constants) == 8
    again = costs_of(inputs, RowReader())
    for i in range(8):
        wanted, found = calibration.model_for(f"w{i}").profile, again.model_for(f"w{i}").profile
        assert found.prefill_s_per_token == pytest.approx(wanted.prefill_s_per_token, rel=1e-6)
    assert len({one.prefill_s_per_token for one in (again.model_for(f"w{i}").profile for i in range(8))}) == 8
    for source in inputs.sources:
        for one in inputs.candidates:
            if one.can_pull:
                wanted_link = calibration.link(source.worker, one.worker)
                assert again.link(source.worker, one.worker) == pytest.approx(wanted_link, rel=1e-6)


def test_replaced_constants_hold_for_every_worker_and_link() -> None:
    inputs = kept(random_question(Random(2)), learnt(8))
    again = costs_of(inputs, RowReader({"admit_s": 7.0, "peer_bytes_per_s": 9.0}))
    assert {again.model_for(one.worker).profile.admit_s for one in inputs.candidates} == {7.0}
    links = {
        again.link(s.worker, c.worker).bytes_per_s
        for s in inputs.sources
        for c in inputs.candidates
        if c.can_pull
    }
    assert links == {9.0}


def test_id_of_constants_names_the_profile_and_changes_with_any_number() -> None:
    name, digest = constants_id("default", PROFILE).split(":")
    other = msgspec.structs.replace(PROFILE, admit_s=PROFILE.admit_s * 1.001)
    assert name == "default"
    assert constants_id("default", PROFILE) == f"default:{digest}"
    assert constants_id("default", other) != f"default:{digest}"


def test_inputs_are_shown_with_names() -> None:
    view = inputs_view(kept(random_question(Random(2)), CostModel(PROFILE)))
    text = msgspec.json.encode(view)
    for name in ("queue_s", "hbm", "trust", "gpu_seconds_weight", "pressure", "sessions"):
        assert f'"{name}"'.encode() in text


def test_a_record_keeps_its_inputs_and_says_with_which_constants() -> None:
    record = Scribe().record(random_question(Random(4)))
    assert record.constants == constants_id("default", PROFILE)
    inputs = msgspec.json.decode(record.inputs, type=DecisionInputs)
    assert inputs.candidates[0].worker == record.worker
    assert record.reachable_cached_tokens is not None
    assert record.reachable_cached_tokens >= record.predicted_cached_tokens


def test_names_of_the_structs_are_those_of_the_planner_s_values() -> None:
    """The native planner reads the inputs as they are."""
    inputs = kept(random_question(Random(5)), CostModel(PROFILE))
    for field in dataclasses.fields(Candidate):
        assert hasattr(inputs.candidates[0], field.name), field.name
    for field in dataclasses.fields(Source):
        assert hasattr(inputs.sources[0], field.name) or field.name in {
            "host",
            "port",
            "extension_address",
        }
    for field in dataclasses.fields(Question):
        assert hasattr(inputs, field.name) or field.name == "explore"
