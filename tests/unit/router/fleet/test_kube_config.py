# SPDX-License-Identifier: Apache-2.0
"""What the section fleet.kubernetes takes."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from router.config import load
from router.config_fleet import FleetConfig
from router.errors import ConfigError
from router.fleet.discovery import api
from router.fleet.discovery.sources import open_discovery
from router.fleet.fleet import Fleet

HOME = {"HOME": "/nowhere"}


def fleet_config(**settings: object) -> FleetConfig:
    overrides: Mapping[str, object] = {f"fleet.kubernetes.{key}": value for key, value in settings.items()}
    return load(environ=HOME, overrides=overrides).fleet


def test_a_pool_or_a_selector_turn_it_on() -> None:
    assert fleet_config(pool="llama").discovers
    assert fleet_config(selector={"app": "vllm"}, ports=[8000]).discovers
    assert not fleet_config().discovers


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        ({"pool": "Llama"}, "pool"),
        ({"pool": "llama", "namespace": "a/b"}, "namespace"),
        ({"pool": "llama", "ports": [8000]}, "pool"),
        ({"selector": {"app": "vllm"}}, "ports"),
        ({"selector": {"app": "vllm"}, "ports": [8000, 8000]}, "ports"),
        ({"selector": {"app": "vllm"}, "ports": list(range(8000, 8009))}, "ports"),
        ({"selector": {"app": "vllm"}, "ports": [70000]}, "ports[0]"),
        ({"pool": "llama", "context": "x"}, "context"),
        ({"pool": "llama", "objectives": "v1"}, "objectives"),
        ({"pool": "llama", "labels": {}}, "labels"),
    ],
)
def test_what_does_not_fit_together_is_named(settings: dict[str, object], field: str) -> None:
    with pytest.raises(ConfigError) as refused:
        fleet_config(**settings)
    assert refused.value.field == f"fleet.kubernetes.{field}"


def test_without_credentials_the_start_says_where_it_looked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    for settings in ({"pool": "llama"}, {"pool": "llama", "kubeconfig": "/nowhere/config"}):
        with pytest.raises(ConfigError) as refused:
            open_discovery(fleet_config(**settings), Fleet((), FleetConfig()))
        assert refused.value.field == "fleet.kubernetes.kubeconfig"


def test_without_the_extra_the_start_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api, "find_spec", lambda _: None)
    with pytest.raises(ConfigError, match=r"pip install 'pointsman\[kubernetes\]'"):
        open_discovery(fleet_config(pool="llama"), Fleet((), FleetConfig()))
