# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from router.cli import EXIT_OK, EXIT_USAGE, run
from router.replay.generator import generate_rows
from router.replay.policies import REPLAY_POLICIES
from router.replay.scenarios import POLICIES
from router.replay.tiers import TIER_SETS

REQUESTS = 30
LONGEST_INPUT_TOKENS = 9000


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    generated = generate_rows(seed=3, duration_s=60)
    rows = [row for row in generated if row.input_length < LONGEST_INPUT_TOKENS][:REQUESTS]
    path = tmp_path / "trace.jsonl.gz"
    path.write_bytes(gzip.compress(b"\n".join(map(msgspec.json.encode, rows)) + b"\n"))
    return path


def replay(capsys: pytest.CaptureFixture[str], trace: Path, *options: str) -> str:
    assert run(["replay", "--trace", str(trace), "--workers", "3", *options]) == EXIT_OK
    return capsys.readouterr().out


def test_every_fleet_and_policy_has_a_row(capsys: pytest.CaptureFixture[str], trace: Path) -> None:
    document = json.loads(replay(capsys, trace, "--tiers", "all", "--policy", "all", "--json"))
    rows: list[dict[str, Any]] = document["rows"]
    assert [(row["tiers"], row["policy"]) for row in rows] == [
        (tiers, policy) for tiers in TIER_SETS for policy in REPLAY_POLICIES
    ]
    for row in rows:
        figures = row["figures"]
        assert figures["requests"] == REQUESTS
        assert sum(figures["hit_rates"].values()) == pytest.approx(figures["hit_rate"])
        assert 0 < figures["ttft_p50_s"] <= figures["ttft_p99_s"]
        reachable = {"gpu": {"hbm"}, "cpu": {"hbm", "ram"}, "storage": {"hbm", "ram", "storage"}}
        beyond = set(figures["hit_rates"]) - reachable.get(row["tiers"], set(figures["hit_rates"]))
        assert not any(figures["hit_rates"][tier] for tier in beyond)


def test_the_table_names_what_was_replayed(capsys: pytest.CaptureFixture[str], trace: Path) -> None:
    out = replay(capsys, trace, "--tiers", "gpu", "--limit", "5", "--speedup", "4")
    lines = [line.split() for line in out.splitlines()]
    assert ["gpu", "kv_aware", "5"] in [line[:3] for line in lines]
    assert "3 workers, arrivals x 4" in out


def test_faster_arrivals_make_longer_queues(capsys: pytest.CaptureFixture[str], trace: Path) -> None:
    means = [
        json.loads(replay(capsys, trace, "--json", "--speedup", speedup))["rows"][0]["figures"]["ttft_mean_s"]
        for speedup in ("0.2", "5")
    ]
    assert means[0] < means[1]


@pytest.mark.parametrize("option", [("--hbm-blocks", "101"), ("--max-input", "6000")])
def test_requests_that_are_too_long_are_left_out_and_counted(
    capsys: pytest.CaptureFixture[str], trace: Path, option: tuple[str, str]
) -> None:
    document = json.loads(replay(capsys, trace, "--json", *option))
    left = document["rows"][0]["figures"]["requests"]
    assert 0 < left < REQUESTS
    assert left + document["too_long"] == REQUESTS


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("--workers", "0"),
        ("--limit", "0"),
        ("--max-input", "0"),
        ("--speedup", "0"),
        ("--speedup", "nan"),
        ("--sessions-per-s", "0"),
        ("--profile", "nosuch"),
        ("--engine-profile", "nosuch"),
        ("--hbm-blocks", "1"),
        ("--ram-blocks", "0"),
        ("--block-size", "0"),
        ("--storage-blocks", "-1"),
        ("--fault", "events@1:9"),
        ("--hbm-blocks", "2"),
        ("--load", "0"),
        ("--load", "0.5"),
        ("--duration", "0"),
        ("--max-gap", "0"),
        ("--regret-sample", "0"),
        ("--noise", "1"),
        ("--slo-ttft", "0"),
    ],
)
def test_a_wrong_option_is_named(
    capsys: pytest.CaptureFixture[str], trace: Path, option: str, value: str
) -> None:
    assert run(["replay", "--trace", str(trace), "--workers", "2", option, value]) == EXIT_USAGE
    assert "pointsman: " in capsys.readouterr().err


def test_a_file_that_is_no_trace_is_named_with_its_line(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "wrong.jsonl"
    path.write_text('{"timestamp": 0}\n')
    assert run(["replay", "--trace", str(path), "--workers", "2"]) == EXIT_USAGE
    assert f"{path}:1" in capsys.readouterr().err
    assert run(["replay", "--trace", str(tmp_path / "none"), "--workers", "2"]) == EXIT_USAGE


def test_traffic_is_a_trace_or_a_scenario(capsys: pytest.CaptureFixture[str], trace: Path) -> None:
    for options in ((), ("--trace", str(trace), "--scenario", "hot_set")):
        with pytest.raises(SystemExit) as raised:
            run(["replay", "--workers", "2", *options])
        assert raised.value.code == EXIT_USAGE
    assert run(["replay", "--trace", str(trace)]) == EXIT_USAGE
    assert "--workers" in capsys.readouterr().err


def test_a_scenario_brings_its_fleet_and_profiles(capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        run(["replay", "--scenario", "document_qa", "--limit", "24", "--policy", "all", "--json"]) == EXIT_OK
    )
    document = json.loads(capsys.readouterr().out)
    assert document["workers"] == 14
    assert document["profile"] == document["engine_profile"] == "gpt-oss-120b-h200"
    assert [row["policy"] for row in document["rows"]] == list(POLICIES)
    by_policy = {row["policy"]: row["figures"] for row in document["rows"]}
    assert {figures["requests"] for figures in by_policy.values()} == {24}
    assert by_policy["load"]["pulls"] == 0
    assert by_policy["load_pull"]["hit_rates"]["peer"] > 0.2
    assert {figures["hit_rates"]["storage"] for figures in by_policy.values()} == {0.0}, "it has none"


def test_a_page_with_bars_and_curves_is_written(
    capsys: pytest.CaptureFixture[str], trace: Path, tmp_path: Path
) -> None:
    page = tmp_path / "page.html"
    replay(capsys, trace, "--tiers", "gpu", "--limit", "5", "--plot", str(page))
    assert page.read_text().count("<svg") == 4
    options = ("--workers", "2", "--limit", "5", "--plot", str(tmp_path / "none" / "page.html"))
    assert run(["replay", "--trace", str(trace), *options]) == EXIT_USAGE
    assert "--plot" in capsys.readouterr().err


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
def test_decisions_are_compared_with_what_could_have_been(
    capsys: pytest.CaptureFixture[str], trace: Path
) -> None:
    options = ("--limit", "12", "--speedup", "20", "--regret-sample", "4")
    regrets = {
        policy: json.loads(replay(capsys, trace, "--json", "--policy", policy, *options))["rows"][0]["regret"]
        for policy in ("round_robin", "oracle")
    }
    assert {one["decisions"] for one in regrets.values()} == {4}
    assert regrets["round_robin"]["p95"] >= regrets["round_robin"]["mean"] > 0
    assert regrets["oracle"]["mean"] == 0
    assert "regret p95" in replay(capsys, trace, "--tiers", "gpu", *options)


def test_goodput_counts_answers_within_the_slo(capsys: pytest.CaptureFixture[str], trace: Path) -> None:
    shares = [
        json.loads(replay(capsys, trace, "--json", "--slo-ttft", ttft))["rows"][0]["figures"]["goodput"]
        for ttft in ("0.001", "1000")
    ]
    assert shares[0] == 0
    assert shares[1] > 0.5


def test_a_killed_worker_costs_answers_and_a_noisy_fleet_repeats(
    capsys: pytest.CaptureFixture[str], trace: Path
) -> None:
    killed = json.loads(replay(capsys, trace, "--json", "--speedup", "20", "--fault", "kill@2:0"))
    assert killed["rows"][0]["figures"]["retried"] + killed["rows"][0]["figures"]["failed"] > 0
    noisy = [replay(capsys, trace, "--json", "--noise", "0.2", "--limit", "10") for _ in range(2)]
    assert noisy[0] == noisy[1]
    assert noisy[0] != replay(capsys, trace, "--json", "--limit", "10")


def test_costs_can_be_learnt_from_a_wrong_profile(capsys: pytest.CaptureFixture[str], trace: Path) -> None:
    wrong = ("--json", "--tiers", "gpu", "--profile", "glm-5.2-h200", "--speedup", "0.2")
    errors = [
        json.loads(replay(capsys, trace, *wrong, *more))["rows"][0]["figures"]["ttft_error_median"]
        for more in ((), ("--calibrate",))
    ]
    assert errors[1] < errors[0]


def test_recorded_sessions_are_replayed_too(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    turns = [
        {"t": 20.0 * i, "type": "s", "in": 640 + 64 * i, "out": 3, "hash_runs": [[1, 10 + i]]}
        for i in range(3)
    ]
    session = {"block_size": 64, "tool_tokens": 128, "system_tokens": 128, "requests": turns}
    path = tmp_path / "sessions.jsonl"
    path.write_bytes(b"\n".join([msgspec.json.encode(session)] * 4))
    document = json.loads(replay(capsys, path, "--json", "--sessions-per-s", "0.5"))
    figures = document["rows"][0]["figures"]
    assert figures["requests"] == 12
    assert figures["hit_rate"] > 0.5


def test_sessions_are_replayed_at_a_share_of_capacity(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    turns = [
        {"t": 30.0 * i, "type": "s", "in": 32000 + 640 * i, "out": 3, "hash_runs": [[1, 500 + 10 * i]]}
        for i in range(6)
    ]
    path = tmp_path / "sessions.jsonl"
    path.write_bytes(msgspec.json.encode({"block_size": 64, "requests": turns}))
    counts = []
    for load in ("0.2", "0.6"):
        document = json.loads(replay(capsys, path, "--json", "--load", load, "--duration", "60"))
        assert f"at {load} of capacity" in document["trace"]
        counts.append(document["rows"][0]["figures"]["requests"])
        assert document["rows"][0]["figures"]["hit_rate"] > 0.5, "histories are cached when the window begins"
    assert counts[1] == pytest.approx(3 * counts[0], rel=0.4)
    assert (
        run(["replay", "--trace", str(path), "--workers", "2", "--load", "0.5", "--speedup", "2"])
        == EXIT_USAGE
    )
    assert "--speedup" in capsys.readouterr().err
