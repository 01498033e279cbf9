# SPDX-License-Identifier: Apache-2.0
"""What the engine's processes can import: the wanted vLLM version, the test hook, and this project's engine side.

The engine's venv does not contain this project. A directory of links gives it `engine_ext` and `gpu_ops` and nothing
else of the repository, with the entry points of pyproject.toml, so that vLLM finds the plugin as in an installation.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import tomllib
from pathlib import Path
from typing import Literal

Version = Literal["0.32", "0.33"]
VERSIONS: tuple[Version, ...] = ("0.32", "0.33")

_HERE = Path(__file__).resolve().parent
_REPOSITORY = _HERE.parents[1]
_PACKAGES = ("engine_ext", "gpu_ops")


def default_version() -> Version:
    """That of engines for which a test names none, from the setting POINTSMAN_VLLM: so all tests run on any version.

    Raises:
        ValueError: the setting names another one.
    """
    named = os.environ.get("POINTSMAN_VLLM", VERSIONS[0])
    for version in VERSIONS:
        if named == version:
            return version
    raise ValueError(f"POINTSMAN_VLLM is {named!r}; it can be {' or '.join(VERSIONS)}")


def has_version(home: Path, version: Version) -> bool:
    """Whether setup.sh installed that version; 0.33 is an overlay that needs its wheel from the package index."""
    return version == "0.32" or (home / f"overlay-{version}/stamp").exists()


def python_path(home: Path, version: Version, *, extension: bool) -> str:
    """PYTHONPATH of an engine of this version, with or without this project's packages."""
    overlay = [home / f"overlay-{version}"] if version != "0.32" else []
    ours = [_linked(home)] if extension else []
    return os.pathsep.join(str(one) for one in [*overlay, _HERE / "hook", *ours])


def _linked(home: Path) -> Path:
    """The directory of links to this checkout, made on first use; safe against another test run doing the same."""
    digest = hashlib.sha256(str(_REPOSITORY).encode()).hexdigest()[:12]
    directory = home / "extension" / digest
    project = tomllib.loads((_REPOSITORY / "pyproject.toml").read_text())["project"]
    info = directory / f"{project['name']}-{project['version']}.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    _write(
        info / "METADATA", f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n"
    )
    groups = project.get("entry-points", {})
    lines = [
        f"[{group}]\n" + "".join(f"{k} = {v}\n" for k, v in rows.items()) for group, rows in groups.items()
    ]
    _write(info / "entry_points.txt", "\n".join(lines))
    for package in _PACKAGES:
        with contextlib.suppress(FileExistsError):
            (directory / package).symlink_to(_REPOSITORY / package)
    return directory


def _write(path: Path, text: str) -> None:
    if path.exists() and path.read_text() == text:
        return
    draft = path.with_name(f"{path.name}.{os.getpid()}")
    draft.write_text(text)
    draft.replace(path)
