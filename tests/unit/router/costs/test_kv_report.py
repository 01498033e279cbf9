# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import logging

import pytest

from router.costs.kv_report import KvBytesReport
from router.fleet.metrics_text import parse_worker_metrics

PAGE = """\
# TYPE vllm:kv_offload_load_bytes_total counter
vllm:kv_offload_load_bytes_total{{engine="0",model_name="m"}} {bytes}
vllm:external_prefix_cache_hits_total{{engine="0",model_name="m"}} {tokens}
vllm:external_prefix_cache_hits_created{{engine="0",model_name="m"}} 1.7e9
"""


@pytest.mark.parametrize(
    ("loaded_bytes", "tokens", "expected"),
    [
        ("1.31072e+09", "10000.0", 131_072.0),
        ("1.31072e+08", "1000.0", None),  # too few to tell
        ("0.0", "10000.0", None),
    ],
)
def test_loads_tell_the_bytes_of_a_token(loaded_bytes: str, tokens: str, expected: float | None) -> None:
    page = PAGE.format(bytes=loaded_bytes, tokens=tokens).encode()
    assert parse_worker_metrics(page).kv_bytes_per_token == expected


def test_a_worker_that_differs_is_shown_and_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    report = KvBytesReport(131_072)
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            report.observed("same", 131_072 * 1.03)
            report.observed("other", 65_536)
    assert report.view() == {
        "profile": 131_072,
        "reported": {"same": 131_072 * 1.03, "other": 65_536},
        "differing": ["other"],
    }
    assert [record.getMessage().split()[1] for record in caplog.records] == ["other"]
    report.forget("other")
    assert report.view()["differing"] == []
