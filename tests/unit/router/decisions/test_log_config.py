# SPDX-License-Identifier: Apache-2.0
"""A log that cannot be written stops start-up with its key, the path and why."""

from __future__ import annotations

from pathlib import Path

import pytest

from router.app import PointsmanApp
from router.config import load
from router.config_fleet import WorkerEntry
from router.decisions.log_file import LogFile
from router.errors import ConfigError


def app_with(home: Path, log: Path) -> PointsmanApp:
    settings = {"index.hash_key_file": str(home / "key"), "decisions.log.path": str(log)}
    workers = [WorkerEntry(url="http://127.0.0.1:9", id="a")]
    return PointsmanApp(load(None, environ={}, overrides=settings, workers=workers))


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"decisions\.log\.path.*nowhere.*No such file"):
        app_with(tmp_path, tmp_path / "nowhere" / "log")


def test_a_log_that_another_process_writes_is_refused(tmp_path: Path) -> None:
    other = LogFile(tmp_path / "log", max_bytes=1000, keep=1)
    other.open()
    with pytest.raises(ConfigError, match="no other process"):
        app_with(tmp_path, tmp_path / "log")
    other.close()
