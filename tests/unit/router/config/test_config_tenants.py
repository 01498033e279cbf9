# SPDX-License-Identifier: Apache-2.0
"""Tenants in the configuration: their rules, keys from the environment, and that no message shows a key."""

from __future__ import annotations

from pathlib import Path

import pytest

from router.config import Config, load
from router.errors import ConfigError

HOME = {"HOME": "/home/someone"}
KEY = "sk-0123456789"


def read(tmp_path: Path, text: str, **environ: str) -> Config:
    file = tmp_path / "pointsman.yaml"
    file.write_text(text)
    return load(file, {**HOME, **environ})


def test_keys_come_from_the_file_and_from_the_variables_it_names(tmp_path: Path) -> None:
    text = f"tenants: {{entries: [{{name: a, api_keys: [{KEY}], api_key_env: [KEY_OF_A]}}]}}"
    [entry] = read(tmp_path, text, KEY_OF_A="sk-from-env").tenants.entries
    assert entry.api_keys == (KEY, "sk-from-env")
    assert (entry.weight, entry.priority, entry.max_in_flight, entry.shared_prefix) == (1.0, 0, None, False)


@pytest.mark.parametrize(
    ("entries", "field"),
    [
        (f"[{{name: a, api_keys: [{KEY}]}}, {{name: a, api_keys: [other-key]}}]", "entries[1].name"),
        (f"[{{name: a, api_keys: [{KEY}]}}, {{name: b, api_keys: [{KEY}]}}]", "entries[1].api_keys[0]"),
        ("[{name: a}]", "entries[0].api_keys"),
        (f"[{{name: anonymous, api_keys: [{KEY}]}}]", "entries[0].api_keys"),
        ("[{name: a, api_key_env: [NOWHERE]}]", "entries[0].api_key_env[0]"),
        ("[{name: a, api_keys: [sk 01234567]}]", "entries[0].api_keys[0]"),
        ("[{name: a, api_keys: [short]}]", "entries[0].api_keys[0]"),
        ("[{name: a, api_keys: [1234567890]}]", "entries[0].api_keys[0]"),
        (f"[{{name: a, api_keys: {KEY}}}]", "entries[0].api_keys"),
        (f"{{name: a, api_keys: [{KEY}]}}", "entries"),
        (f"[{{name: a b, api_keys: [{KEY}]}}]", "entries[0].name"),
        (f"[{{name: a, api_keys: [{KEY}], weight: 0}}]", "entries[0].weight"),
        (f"[{{name: a, api_keys: [{KEY}], priority: 101}}]", "entries[0].priority"),
        (f"[{{name: a, api_keys: [{KEY}], max_in_flight: 0}}]", "entries[0].max_in_flight"),
    ],
)
def test_what_is_wrong_is_named_and_no_key_is_shown(tmp_path: Path, entries: str, field: str) -> None:
    with pytest.raises(ConfigError) as refused:
        read(tmp_path, f"tenants: {{entries: {entries}}}")
    assert refused.value.field == f"tenants.{field}"
    for key in (KEY, "short", "1234567890", "sk 01234567", "other-key"):
        assert key not in str(refused.value)


def test_a_key_can_only_be_required_where_there_is_one(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as refused:
        read(tmp_path, "tenants: {require: true, entries: [{name: anonymous, weight: 2}]}")
    assert refused.value.field == "tenants.require"


def test_broken_yaml_in_the_environment_shows_no_key() -> None:
    with pytest.raises(ConfigError) as refused:
        load(environ={**HOME, "POINTSMAN_TENANTS__ENTRIES": f"[{{name: a, api_keys: [{KEY}"})
    assert KEY not in str(refused.value)


def test_the_repr_of_a_configuration_shows_no_key(tmp_path: Path) -> None:
    config = read(tmp_path, f"tenants: {{entries: [{{name: a, api_keys: [{KEY}]}}]}}")
    assert KEY not in repr(config)
    assert "name='a'" in repr(config)
