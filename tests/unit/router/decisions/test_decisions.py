# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest

from router.decisions.log import DecisionLog
from router.decisions.record import DecisionRecord, explain, make_record, path_text
from router.errors import FallbackReason, NotFoundError
from router.plan.candidate import Plan, Terms
from router.plan.decider import Decision
from router.plan.planner import Planned


def plan(worker: str, queue_s: float = 0.0, prefill_s: float = 0.1, **path_blocks: int) -> Plan:
    terms = Terms(queue_s=queue_s, admit_s=0.001, prefill_s=prefill_s)
    return Plan(
        worker=worker,
        dp_rank=0,
        block_size_tokens=16,
        prompt_blocks=sum(path_blocks.values()),
        path_blocks=path_blocks,
        cached_tokens=16 * (sum(path_blocks.values()) - path_blocks.get("recompute", 0)),
        terms=terms,
        score_s=terms.total_s,
    )


def record(
    request_id: str, worker: str = "a", model: str = "m", attempt: int = 1, **path: int
) -> DecisionRecord:
    plans = (plan(worker, **(path or {"recompute": 3})), plan("z", queue_s=1.0, recompute=3))
    return make_record(
        request_id=request_id,
        attempt=attempt,
        time_unix_s=1.0,
        model=model,
        policy="kv_aware",
        prompt_tokens=48,
        decision=Decision(Planned(plans), index_version=7, index_age_s=0.5, indexed=True),
        tokens_from="local",
        transfer_params=None,
        fallback=None,
    )


def test_record_has_every_term_of_every_candidate() -> None:
    built = msgspec.to_builtins(record("r", hbm=2, recompute=1))
    assert built["worker"] == "a"
    assert built["path_blocks"] == {"hbm": 2, "recompute": 1}
    assert [one["worker"] for one in built["candidates"]] == ["a", "z"]
    for one in built["candidates"]:
        terms = {"queue", "admit", "ram", "peer", "storage", "prefill", "remote", "decode", "displaced"}
        assert one["seconds"].keys() == terms
    assert built["predicted_cached_tokens"] == 32


def test_only_the_best_candidates_are_kept_and_all_are_counted() -> None:
    plans = tuple(plan(f"w{i}", queue_s=i, recompute=1) for i in range(40))
    many = replace(Decision(Planned(plans), 0, None, indexed=True))
    kept = make_record(
        request_id="r",
        attempt=1,
        time_unix_s=0.0,
        model=None,
        policy="kv_aware",
        prompt_tokens=1,
        decision=many,
        tokens_from="local",
        transfer_params=None,
        fallback=None,
    )
    assert (len(kept.candidates), kept.candidate_count) == (16, 40)


def test_reason_names_what_made_the_difference() -> None:
    text = explain((plan("a", prefill_s=0.1, hbm=9), plan("b", prefill_s=0.9, recompute=9)), "kv_aware", None)
    assert "hbm:9" in text
    assert "largest difference is prefill (0.800 s less)" in text


def test_reason_tells_chance_fallback_and_policy_apart() -> None:
    same = (plan("a", recompute=1), plan("b", recompute=1))
    assert "chance" in explain(same, "kv_aware", None)
    assert "multimodal" in explain(same, "kv_aware", FallbackReason.MULTIMODAL)
    assert "without looking" in explain(same, "round_robin", FallbackReason.POLICY)
    assert "only candidate" in explain(same[:1], "kv_aware", None)


def test_path_is_written_in_blocks() -> None:
    assert path_text({"hbm": 24, "peer": 96, "recompute": 8}) == "hbm:24,peer:96,recompute:8"


def test_log_keeps_the_newest_and_counts_the_rest() -> None:
    log = DecisionLog(capacity=3)
    for i in range(5):
        log.add(record(f"r{i}"))
    assert [one.id for one in log.select(10)] == ["r4", "r3", "r2"]
    assert log.dropped == 2
    with pytest.raises(NotFoundError):
        log.get("r0")


def test_attempts_of_one_request_stay_together() -> None:
    log = DecisionLog(capacity=3)
    log.add(record("r", worker="a"))
    log.add(record("r", worker="b", attempt=2))
    assert [one.worker for one in log.get("r")] == ["a", "b"]


def test_id_that_a_client_uses_again_names_its_newest_request() -> None:
    log = DecisionLog(capacity=3)
    for worker in "abc":
        log.add(record("same", worker=worker))
    assert [one.worker for one in log.get("same")] == ["c"]


def test_filters_are_all_met() -> None:
    log = DecisionLog(capacity=9)
    log.add(record("1", worker="a", model="m", hbm=1))
    log.add(record("2", worker="a", model="n", hbm=1))
    log.add(record("3", worker="b", model="m", recompute=1))
    assert [one.id for one in log.select(9, model="m")] == ["3", "1"]
    assert [one.id for one in log.select(9, worker="a", path="hbm")] == ["2", "1"]
    assert [one.id for one in log.select(9, path="peer")] == []
    assert [one.id for one in log.select(1)] == ["3"]
