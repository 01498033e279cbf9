# SPDX-License-Identifier: Apache-2.0
"""The files of an adapter: what counts, and where a name of the hub leads."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from engine_ext.vllm.adapters.files import FolderFiles, folder_of


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "adapter_config.json").write_text("{}")
    (tmp_path / "adapter_model.safetensors").write_bytes(b"weights")
    return tmp_path


def test_a_copy_elsewhere_has_the_same_digest_and_another_state(folder: Path) -> None:
    copy = folder / "copy"
    copy.mkdir()
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        (copy / name).write_bytes((folder / name).read_bytes())
    files = FolderFiles()
    assert files.digest(str(folder)) == files.digest(str(copy)) is not None
    assert files.state(str(folder)) != files.state(str(copy))


def test_every_byte_of_config_and_weights_counts_and_nothing_else(folder: Path) -> None:
    files = FolderFiles()
    first = files.digest(str(folder)), files.state(str(folder))
    (folder / "README.md").write_text("words")
    (folder / "optimizer.pt").write_bytes(b"state")
    assert (files.digest(str(folder)), files.state(str(folder))) == first
    (folder / "adapter_model.safetensors").write_bytes(b"weightz")
    second = files.digest(str(folder))
    (folder / "adapter_config.json").write_text('{"r": 8}')
    assert len({first[0], second, files.digest(str(folder))}) == 3


def test_a_write_that_sets_the_time_back_changes_the_state(folder: Path) -> None:
    files, path = FolderFiles(), folder / "adapter_model.safetensors"
    status, before = path.stat(), files.state(str(folder))
    while files.state(str(folder)) == before:  # until the clock of the file system ticks
        path.write_bytes(b"weightz")
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert path.stat().st_mtime_ns == status.st_mtime_ns


def test_no_folder_and_a_folder_without_an_adapter_have_neither_state_nor_digest(tmp_path: Path) -> None:
    files = FolderFiles()
    for path in (str(tmp_path), str(tmp_path / "missing"), "owner/unknown"):
        assert (files.state(path), files.digest(path)) == (None, None)


def test_a_name_of_the_hub_leads_to_the_commit_that_the_cache_has_as_main(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    repository = tmp_path / "models--owner--adapter"
    snapshot = repository / "snapshots" / "c0ffee"
    snapshot.mkdir(parents=True)
    (snapshot / "adapter_model.bin").write_bytes(b"w")
    assert folder_of("owner/adapter") is None
    (repository / "refs").mkdir()
    (repository / "refs/main").write_text("c0ffee\n")
    assert folder_of("owner/adapter") == snapshot
    assert FolderFiles().digest("owner/adapter") is not None
