# SPDX-License-Identifier: Apache-2.0
"""Orders of the published fleet scenarios; in full they are replayed by ``tests/bench/scenarios.py``.

Blocks are larger here than published, which costs a fraction of the time and changes little: prefixes are long.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from router.cli import EXIT_OK, run

HBM_TOKENS, RAM_TOKENS = 1_220_000, 2_220_000


def replay(
    capsys: pytest.CaptureFixture[str], scenario: str, block_tokens: int, policy: str, *more: str
) -> dict[str, Any]:
    sizes = {
        "--block-size": block_tokens,
        "--hbm-blocks": HBM_TOKENS // block_tokens,
        "--ram-blocks": RAM_TOKENS // block_tokens,
    }
    options = [str(part) for pair in sizes.items() for part in pair]
    assert run(["replay", "--scenario", scenario, "--policy", policy, "--json", *options, *more]) == EXIT_OK
    row: dict[str, Any] = json.loads(capsys.readouterr().out)["rows"][0]
    return {**row["figures"], "ttft_p95_s": row["ttft_percentiles_s"][95]}


def test_spreading_with_pulls_has_the_best_tail_on_documents_and_ours_is_no_worse(
    capsys: pytest.CaptureFixture[str],
) -> None:
    # A block as long as what all conversations begin with.
    affinity, spread, ours = (
        replay(capsys, "document_qa", 256, policy) for policy in ("affinity", "load_pull", "kv_aware")
    )
    assert spread["ttft_p99_s"] < affinity["ttft_p99_s"]
    assert spread["ttft_p95_s"] < affinity["ttft_p95_s"]
    assert spread["requests_per_s"] > affinity["requests_per_s"]
    assert ours["ttft_p99_s"] <= spread["ttft_p99_s"]
    assert ours["requests_per_s"] >= spread["requests_per_s"]
    assert ours["ttft_p50_s"] <= min(spread["ttft_p50_s"], affinity["ttft_p50_s"])


def test_affinity_wins_a_uniform_pool_by_a_little_and_pulls_rescue_spreading(
    capsys: pytest.CaptureFixture[str],
) -> None:
    affinity, spread, unaided, ours = (
        replay(capsys, "uniform_pool", 512, policy, "--limit", "240")
        for policy in ("affinity", "load_pull", "load", "kv_aware")
    )
    assert affinity["requests_per_s"] >= spread["requests_per_s"] > 2 * unaided["requests_per_s"]
    assert affinity["ttft_p50_s"] < spread["ttft_p50_s"] < unaided["ttft_p50_s"] / 2
    assert ours["requests_per_s"] >= 0.99 * affinity["requests_per_s"]
    assert ours["ttft_p50_s"] <= 1.01 * affinity["ttft_p50_s"]
