# SPDX-License-Identifier: Apache-2.0
"""The objects of one resource as lists and watches tell them. No I/O.

Two rules of this file:

* A list is the truth: what it does not have is gone, whatever became of its DELETED.
* A name belongs to the youngest uid seen: news of an older one of the same name changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Generic, Protocol, TypeVar

from router.fleet.discovery.objects import Metadata


class KubernetesObject(Protocol):
    @property
    def metadata(self) -> Metadata: ...


ObjectT = TypeVar("ObjectT", bound=KubernetesObject)


class ObjectStore(Generic[ObjectT]):
    """Objects by name. Every call but ``replace_all`` is O(1)."""

    def __init__(self) -> None:
        self._objects: dict[tuple[str, str], ObjectT] = {}

    def __iter__(self) -> Iterator[ObjectT]:
        return iter(self._objects.values())

    def __len__(self) -> int:
        return len(self._objects)

    def replace_all(self, objects: Iterable[ObjectT]) -> None:
        """A whole list."""
        self._objects = {_key(one): one for one in objects}

    def put(self, one: ObjectT) -> bool:
        """ADDED or MODIFIED, which may come twice; whether it changed anything."""
        key = _key(one)
        known = self._objects.get(key)
        if known is not None:
            if known.metadata.uid != one.metadata.uid and _created(one) < _created(known):
                return False
            if known == one:
                return False
        self._objects[key] = one
        return True

    def delete(self, one: ObjectT) -> bool:
        """DELETED; that of an older uid of the same name changes nothing."""
        known = self._objects.get(_key(one))
        if known is None or known.metadata.uid != one.metadata.uid:
            return False
        del self._objects[_key(one)]
        return True


def _key(one: KubernetesObject) -> tuple[str, str]:
    return one.metadata.namespace, one.metadata.name


def _created(one: KubernetesObject) -> str:
    return one.metadata.creation_timestamp or ""
