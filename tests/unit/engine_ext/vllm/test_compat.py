# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import itertools
import re
from dataclasses import fields
from pathlib import Path

import pytest

import engine_ext.vllm
from engine_ext.vllm.compat import (
    SUPPORTED,
    Traits,
    UnsupportedVllm,
    traits_of,
    unknown_is_allowed,
)


@pytest.mark.parametrize(
    ("version", "row"),
    [
        ("0.32.0", "0.32"),
        ("0.32.0+cpu", "0.32"),
        ("0.32.5.dev3", "0.32"),
        ("0.33.0", "0.33"),
        ("0.33", "0.33"),
    ],
)
def test_builds_and_patch_releases_share_a_row(version: str, row: str) -> None:
    assert traits_of(version).version == row


@pytest.mark.parametrize("version", ["0.31.9", "0.34.0", "0.330.0", "0.3", "1.32.0", "dev", "", "0.32rc1"])
def test_an_unknown_version_is_refused_with_its_name_and_what_would_help(version: str) -> None:
    with pytest.raises(UnsupportedVllm) as refused:
        traits_of(version)
    assert f"vLLM {version} is not supported" in str(refused.value)
    for needed in ("0.32, 0.33", "pointsman_allow_unknown_vllm: true", "POINTSMAN_ALLOW_UNKNOWN_VLLM=1"):
        assert needed in str(refused.value)


def test_an_allowed_unknown_version_is_taken_for_the_newest_known_one() -> None:
    assert traits_of("0.99.0", allow_unknown=True) is SUPPORTED[-1]
    assert traits_of("0.32.0", allow_unknown=True).version == "0.32"


@pytest.mark.parametrize(
    ("extra", "environment", "allowed"),
    [
        ({}, {}, False),
        ({"pointsman_allow_unknown_vllm": True}, {}, True),
        ({"pointsman_allow_unknown_vllm": "no"}, {}, False),
        ({}, {"POINTSMAN_ALLOW_UNKNOWN_VLLM": "1"}, True),
        ({}, {"POINTSMAN_ALLOW_UNKNOWN_VLLM": "0"}, False),
    ],
)
def test_only_a_plain_yes_allows_an_unknown_version(
    extra: dict[str, object], environment: dict[str, str], allowed: bool
) -> None:
    assert unknown_is_allowed(extra, environment) is allowed


def test_rows_go_from_old_to_new_and_nothing_that_was_added_is_taken_away() -> None:
    versions = [tuple(map(int, row.version.split("."))) for row in SUPPORTED]
    assert versions == sorted(set(versions))
    for older, newer in itertools.pairwise(SUPPORTED):
        for one in fields(Traits):
            if one.name != "version":
                assert getattr(older, one.name) <= getattr(newer, one.name), one.name


def test_the_readme_has_a_column_for_every_version_and_a_row_for_every_trait() -> None:
    text = (Path(engine_ext.vllm.__file__).parent / "README.md").read_text()
    section = text.split("## Supported vLLM versions")[1].split("\n## ")[0]
    header, _, *rows = re.findall(r"^\|.*\|$", section, re.MULTILINE)
    assert [cell.strip() for cell in header.strip("|").split("|")][1:] == [row.version for row in SUPPORTED]
    assert len(rows) == len(fields(Traits)) - 1
