# SPDX-License-Identifier: Apache-2.0
"""The published tables of pull against recompute: what is fitted on some rows predicts the others."""

from __future__ import annotations

import json
import statistics

import pytest

from router.cli import run
from router.costs.fit import fit_pull, fit_recompute
from router.costs.model import CostModel
from router.costs.profile import MeasuredRow, load_profile, profile_names

PUBLISHED = [name for name in profile_names() if load_profile(name).measured]
NEAR_TIE = ("glm-5.2-h200", 13_648)


def test_the_published_sets_are_there() -> None:
    assert PUBLISHED == ["glm-5.2-h200", "gpt-oss-120b-h200", "gpt-oss-120b-h200-a"]


@pytest.mark.parametrize("name", PUBLISHED)
def test_every_other_row_predicts_the_rows_between(name: str) -> None:
    rows = load_profile(name).measured
    pull = fit_pull(rows[::2])
    recompute = fit_recompute(rows[::2], pull.floor_s)
    pull_errors = []
    for row in rows[1::2]:
        assert recompute.seconds(row.tokens) == pytest.approx(row.recompute_s, rel=0.15)
        assert pull.seconds(row.tokens) == pytest.approx(row.pull_s, rel=0.30)
        pull_errors.append(abs(pull.seconds(row.tokens) / row.pull_s - 1))
        if (name, row.tokens) != NEAR_TIE:
            assert (pull.seconds(row.tokens) < recompute.seconds(row.tokens)) == (
                row.pull_s < row.recompute_s
            )
    assert statistics.median(pull_errors) <= 0.10


@pytest.mark.parametrize("name", PUBLISHED)
def test_profile_decides_every_row_as_measured(name: str) -> None:
    profile = load_profile(name)
    for row in profile.measured:
        seconds = CostModel(profile).path_seconds(row.tokens)
        assert seconds["recompute"] == pytest.approx(row.recompute_s, rel=0.15)
        assert seconds["peer"] == pytest.approx(row.pull_s, rel=0.30)
        assert (seconds["peer"] < seconds["recompute"]) == (row.pull_s < row.recompute_s)


def test_pull_crosses_recompute_where_it_was_measured_to() -> None:
    assert 8_070 < (CostModel(load_profile("glm-5.2-h200")).crossover_tokens() or 0) < 21_617
    for name in PUBLISHED[1:]:
        assert (CostModel(load_profile(name)).crossover_tokens() or 0) < 2_048


def test_fit_finds_the_constants_behind_exact_rows_and_shrugs_off_one_bad_pull() -> None:
    tokens = [1000, 5000, 10_000, 20_000, 50_000, 90_000, 120_000]
    rows = [
        MeasuredRow(n, 0.02 + 5e-5 * n + 4e-10 * n * n / 2, 0.3 + 6e-6 * n + (2.0 if n == 20_000 else 0.0))
        for n in tokens
    ]
    recompute, pull = fit_recompute(rows), fit_pull(rows)
    assert recompute.s_per_token == pytest.approx(5e-5, rel=1e-3)
    assert recompute.s_per_token_squared == pytest.approx(4e-10, rel=1e-3)
    assert pull.seconds(30_000) == pytest.approx(0.48, rel=0.05)


def test_constants_are_never_negative() -> None:
    falling = [
        MeasuredRow(n, 1.0 + 1e-6 * (100_000 - n), 1.0 - 1e-6 * n) for n in (1000, 20_000, 40_000, 80_000)
    ]
    fit = fit_recompute(falling)
    assert min(fit.start_s, fit.s_per_token, fit.s_per_token_squared) >= 0
    assert fit_pull(falling).s_per_token == 0


def test_command_prints_the_seconds_of_every_path(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["costs", "--profile", "glm-5.2-h200", "--tokens", "8070,98220", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert [row["tokens"] for row in document["rows"]] == [8070, 98220]
    for row in document["rows"]:
        assert row["seconds"].keys() == {"hbm", "ram", "peer", "storage", "recompute"}
        assert row["seconds"]["hbm"] < row["seconds"]["ram"] < row["seconds"]["peer"]
    assert run(["costs", "--tokens", "1000"]) == 0
    assert "A pull beats recomputing from" in capsys.readouterr().out


@pytest.mark.parametrize("tokens", ["", "0", "1,x", "-5", "1e3"])
def test_bad_lengths_are_bad_usage(tokens: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["costs", f"--tokens={tokens}"]) == 2
    assert "--tokens" in capsys.readouterr().err
