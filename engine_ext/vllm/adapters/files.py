# SPDX-License-Identifier: Apache-2.0
"""The files of an adapter in the folder from which vLLM loads it (`vllm/lora/utils.py`, `lora_model.py`)."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from pathlib import Path

PREFIXES = ("adapter_", "new_embeddings")
"""Names of what vLLM reads: adapter_config.json, adapter_model.*, new_embeddings.*."""
_CHUNK_BYTES = 1 << 20

FileState = tuple[str, int, int, int, int]
"""Name, size, two times in ns, inode. The time of the inode's change shows even writes that set the other one back."""


class FolderFiles:
    """`AdapterFiles` over the file system and the Hugging Face cache. Downloads nothing."""

    def state(self, path: str) -> tuple[FileState, ...] | None:
        try:
            found = tuple(_state(file) for file in _files(path))
        except OSError:
            return None
        return found or None

    def digest(self, path: str) -> str | None:
        digest = hashlib.sha256()
        found = False
        try:
            for file in _files(path):
                found = True
                name = file.name.encode()
                digest.update(len(name).to_bytes(8, "big") + name + file.stat().st_size.to_bytes(8, "big"))
                with file.open("rb") as opened:
                    while chunk := opened.read(_CHUNK_BYTES):
                        digest.update(chunk)
        except OSError:
            return None
        return digest.hexdigest() if found else None


def _state(file: Path) -> FileState:
    status = file.stat()
    return file.name, status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino


def _files(path: str) -> Iterator[Path]:
    folder = folder_of(path)
    if folder is not None:
        yield from sorted(one for one in folder.iterdir() if one.name.startswith(PREFIXES))


def folder_of(path: str) -> Path | None:
    """Where vLLM finds an adapter that is named so: a folder, or what the hub's cache has of a repository."""
    local = Path(path).expanduser()
    if local.is_absolute() or local.exists():
        return local if local.is_dir() else None
    home = os.environ.get("HF_HUB_CACHE") or Path(
        os.environ.get("HF_HOME") or Path.home() / ".cache/huggingface", "hub"
    )
    repository = Path(home, "models--" + path.replace("/", "--"))
    try:
        commit = (repository / "refs/main").read_text().strip()
    except OSError:
        return None
    snapshot = repository / "snapshots" / commit
    return snapshot if snapshot.is_dir() else None
