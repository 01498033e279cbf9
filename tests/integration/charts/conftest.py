# SPDX-License-Identifier: Apache-2.0
"""The real helm, and the chart rendered with it."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

CHART = Path(__file__).parents[3] / "charts/pointsman"
EXAMPLES = sorted((CHART / "examples").glob("*.yaml"))
RELEASE, NAMESPACE = "rel", "prod"

Object = dict[str, Any]


def find_helm() -> str | None:
    """POINTSMAN_HELM, what setup.sh made beside the real engine or in the cache, or the one on the path."""
    real = os.environ.get("POINTSMAN_REAL")
    places = [
        os.environ.get("POINTSMAN_HELM"),
        f"{real}/helm/helm" if real else None,
        str(Path.home() / ".cache/pointsman-helm/helm"),
        shutil.which("helm"),
    ]
    return next((place for place in places if place and os.access(place, os.X_OK)), None)


@pytest.fixture(scope="session")
def helm() -> str:
    found = find_helm()
    if found is None:
        reason = "no helm; get it with: tests/integration/charts/setup.sh"
        if os.environ.get("POINTSMAN_CI") == "1":
            pytest.fail(reason, pytrace=False)
        pytest.skip(reason)
    return found


@dataclass
class Rendered:
    """The objects of a release."""

    objects: list[Object]

    def of(self, kind: str, name: str | None = None) -> Object:
        """The one object of a kind."""
        (one,) = self.all(kind, name)
        return one

    def all(self, kind: str, name: str | None = None) -> list[Object]:
        return [
            one
            for one in self.objects
            if one["kind"] == kind and (name is None or one["metadata"]["name"] == name)
        ]

    def settings(self) -> str:
        """The configuration file of the service."""
        text: str = self.of("ConfigMap", f"{RELEASE}-pointsman")["data"]["pointsman.yaml"]
        return text


Render = Callable[..., Rendered]


@pytest.fixture
def render(helm: str, tmp_path: Path) -> Render:
    """`render(values, *files)`; raises CalledProcessError with helm's words when it refuses."""

    def run(values: Object | None = None, *files: Path) -> Rendered:
        own = tmp_path / "values.yaml"
        own.write_text(yaml.safe_dump(values or {}))
        command = [helm, "template", RELEASE, str(CHART), "--namespace", NAMESPACE]
        for file in (*files, own):
            command += ["--values", str(file)]
        environment = {"HOME": str(tmp_path), "PATH": os.environ["PATH"]}
        done = subprocess.run(
            command, capture_output=True, text=True, check=True, env=environment, timeout=120
        )
        return Rendered([one for one in yaml.safe_load_all(done.stdout) if one])

    return run
