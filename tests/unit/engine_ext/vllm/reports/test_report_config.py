# SPDX-License-Identifier: Apache-2.0
"""The ``report_*`` keys of an engine's extra configuration."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from engine_ext.vllm.reports.config import ReportConfig, ReportConfigError, read_report_config

URL = "http://10.0.0.1:8080"


def test_without_urls_nothing_is_reported() -> None:
    assert read_report_config({}, {}) is None
    assert read_report_config({"report_urls": []}, {"POINTSMAN_REPORT_TOKEN": "t"}) is None
    assert read_report_config({"report_urls": "", "other": 1}, {}) is None


def test_every_key_is_read() -> None:
    extra = {
        "report_urls": [URL + "/", URL, "https://router.example/base/"],
        "report_token": "t0ken",
        "report_interval_s": 1,
        "report_timeout_s": 2.5,
        "report_queue": 7,
        "spec_name": "PointsmanOffloadingSpec",
    }
    assert read_report_config(extra, {}) == ReportConfig(
        urls=(URL, "https://router.example/base"),
        token="t0ken",  # noqa: S106
        interval_s=1,
        timeout_s=2.5,
        queue=7,
    )
    assert read_report_config({"report_urls": f"{URL}, http://[::1]:1"}, {}) == ReportConfig(
        urls=(URL, "http://[::1]:1")
    )


def test_the_token_comes_from_the_first_place_that_has_one(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text("of-file\n")
    environ = {"POINTSMAN_REPORT_TOKEN": "of-environment"}

    def token(**extra: Any) -> str | None:
        config = read_report_config({"report_urls": URL, **extra}, environ)
        assert config is not None
        return config.token

    assert token() == "of-environment"
    assert token(report_token_file=str(file)) == "of-file"
    assert token(report_token_file=str(file), report_token="own") == "own"  # noqa: S106


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("report_urls", "10.0.0.1:8080"),
        ("report_urls", "ftp://10.0.0.1"),
        ("report_urls", "http://user:secret@10.0.0.1"),
        ("report_urls", "http://10.0.0.1:99999"),
        ("report_urls", "http://10.0.0.1:0"),
        ("report_urls", [URL, 7]),
        ("report_urls", {"a": URL}),
        ("report_urls", [f"{URL}{n}" for n in range(9)]),
        ("report_interval_s", 0),
        ("report_interval_s", "1"),
        ("report_timeout_s", True),
        ("report_queue", 1.5),
        ("report_queue", 0),
        ("report_token", ""),
        ("report_token", "caf\u00e9"),
        ("report_token", "two\nlines"),
        ("report_token_file", "/nowhere/at/all"),
        ("report_token_file", 7),
        ("report_url", URL),
    ],
)
def test_what_is_not_accepted_is_named(key: str, value: object) -> None:
    with pytest.raises(ReportConfigError, match=key):
        read_report_config({"report_urls": URL, key: value}, {})


def test_a_token_is_never_shown() -> None:
    config = read_report_config({"report_urls": URL, "report_token": "t0ken"}, {})
    assert "t0ken" not in repr(config)
    with pytest.raises(ReportConfigError) as caught:
        read_report_config({"report_urls": URL, "report_token": "t0ken\n"}, {})
    assert "t0ken" not in str(caught.value)
