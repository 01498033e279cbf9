# SPDX-License-Identifier: Apache-2.0
"""The index of several processes: the keeper writes it into a file, those that serve read it there.

Every keeper begins a file of its own, so those that read an older one go on with that until they are told of the new.
"""

from __future__ import annotations

from pathlib import Path

from indexer import _core
from indexer.hashing import HashKey
from indexer.index import IndexLimits, PrefixIndex, open_index, open_reader
from router.errors import ConfigError
from router.plan.shared_reader import SharedReader
from router.processes.told import IndexTold

_NAME = "index."


def write_shared_index(
    key: HashKey, limits: IndexLimits, directory: Path, generation: int
) -> tuple[PrefixIndex, IndexTold]:
    """An empty index, and how it is found once it is published.

    Raises:
        ConfigError: there is no room for it.
    """
    path = directory / f"{_NAME}{generation}"
    try:
        return open_index(key, limits, "native", path), IndexTold(generation, str(path))
    except OSError as error:
        accepted = f"a directory with room for the index ({error})"
        raise ConfigError("server.shared_dir", str(directory), accepted) from error


def publish_index(index: PrefixIndex) -> None:
    """Let it be found."""
    if isinstance(index, _core.PrefixIndex):
        index.publish()


def remove_older(told: IndexTold) -> None:
    """Files of keepers before; who still reads one keeps it until it is done."""
    for path in Path(told.path).parent.glob(f"{_NAME}*"):
        if path != Path(told.path):
            path.unlink(missing_ok=True)


class ReadsIndex:
    """Implements ``followed_holders.OpensIndex``."""

    def __init__(self, key: HashKey) -> None:
        self._key = key

    def __call__(self, told: IndexTold) -> SharedReader:
        """Open the index that the keeper tells of.

        Raises:
            OSError: there is none.
            ValueError: it is of another version or hash key.
        """
        return SharedReader(open_reader(Path(told.path), self._key))
