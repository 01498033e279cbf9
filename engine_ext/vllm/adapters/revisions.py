# SPDX-License-Identifier: Apache-2.0
"""Which weights an adapter had when a block was computed, as a word that goes into the hash of the block.

vLLM tells adapters apart by name and path. Files that are replaced in place keep both, and then blocks of the old
weights would be found again: in HBM, in RAM, at peers, on disk. So the content of the files goes into the hash too.
The rule: two requests have the same word only if the same weights computed them.

* A word is the digest of the files as they were when the engine loaded them. Other hosts come to the same word.
* Files that differ from what was loaded belong to a reload that is yet to come, or to one that the engine made by
  itself after it had dropped the adapter. Nobody can say which weights compute, so each request gets a word of its own.
* Weights that come back after others had their place get a new word: a request that was hashed before the first
  reload may have been computed after it.

Pure: files, chance and the clock are given. Safe to call from several threads.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Protocol

from .former import Weights

logger = logging.getLogger("vllm.pointsman.adapters")

SETTLE_S = 2.0
"""Files are read again for so long after they were read first: until then a file that is written once more may keep
its times, which file systems count in ticks of up to a second."""


class AdapterFiles(Protocol):
    def state(self, path: str) -> Hashable | None:
        """Changes whenever the files do, but for `SETTLE_S`; None: there are none, or nobody knows where."""

    def digest(self, path: str) -> str | None:
        """Of the content, the same on every host; None as for `state`."""


@dataclass(frozen=True, slots=True)
class Adapter:
    """What a request says of its adapter."""

    adapter_id: int
    name: str
    path: str


@dataclass(eq=False, slots=True)
class Load:
    """One load of an adapter into the engine."""

    path: str
    state: Hashable | None
    """Of the files; None: it is not known what was loaded."""
    digest: str
    word: str
    read_s: float
    settled: bool = False


@dataclass(eq=False, slots=True, weakref_slot=True)
class Stamp:
    """Of one request, which keeps it alive."""

    word: str
    adapter: Adapter
    load: Load | None
    """None: no other request has this word."""

    @property
    def weights(self) -> Weights:
        return Weights(self.adapter.name, self.adapter.path, self.word)


@dataclass(slots=True)
class _History:
    load: Load
    digests: set[str] = field(default_factory=set)
    """Of this load and all before it."""


class AdapterRevisions:
    """One per engine."""

    def __init__(self, files: AdapterFiles, nonce: Callable[[], str], monotonic: Callable[[], float]) -> None:
        self._files = files
        self._nonce = nonce
        self._monotonic = monotonic
        self._lock = threading.Lock()
        self._known: dict[tuple[int, str], _History] = {}
        self._stamps: weakref.WeakValueDictionary[str, Stamp] = weakref.WeakValueDictionary()
        self._warned: set[str] = set()
        self._listeners: list[weakref.WeakMethod[Callable[[Weights], object]]] = []

    def stamp(self, request_id: str, adapter: Adapter) -> Stamp:
        """The word for all blocks of this request. Keep the stamp as long as the request."""
        load = self._load_of(adapter)
        if load is None or not self._unchanged(load):
            self._warn(adapter)
            stamp = Stamp(self._nonce(), adapter, None)
        else:
            stamp = Stamp(load.word, adapter, load)
        with self._lock:
            self._stamps[request_id] = stamp
        return stamp

    def may_store(self, request_id: str) -> bool:
        """Whether what this request computed may go where others find it. True for requests without a stamp."""
        with self._lock:
            stamp = self._stamps.get(request_id)
            if stamp is None:
                return True
            known = self._known.get((stamp.adapter.adapter_id, stamp.adapter.name))
        if stamp.load is None or known is None or known.load is not stamp.load:
            return False
        return self._unchanged(stamp.load)

    def weights_of(self, request_id: str) -> Weights | None:
        """Those of a request with a stamp."""
        with self._lock:
            stamp = self._stamps.get(request_id)
        return None if stamp is None else stamp.weights

    def listen(self, loaded: Callable[[Weights], object]) -> None:
        """A bound method that is called after every load with what the adapter has now, as long as its object lives."""
        self._listeners.append(weakref.WeakMethod(loaded))

    def before_load(self, path: str) -> Hashable | None:
        """To be called before the engine loads an adapter; the answer goes to `loaded`."""
        return self._files.state(path)

    def loaded(self, adapter: Adapter, before: Hashable | None, *, in_place: bool) -> Weights:
        """The engine was asked to load this adapter, and has. One that is there already it loads only `in_place`.

        What it has now; listeners are told.
        """
        load = self._loaded(adapter, before, in_place=in_place)
        now = Weights(adapter.name, load.path, load.word)
        listeners = [method() for method in self._listeners]
        self._listeners = [method for method, alive in zip(self._listeners, listeners, strict=True) if alive]
        for listener in listeners:
            if listener is not None:
                listener(now)
        return now

    def _loaded(self, adapter: Adapter, before: Hashable | None, *, in_place: bool) -> Load:
        key = (adapter.adapter_id, adapter.name)
        with self._lock:
            known = self._known.get(key)
        if known is not None and not in_place:
            return known.load
        load = self._read(adapter.path)
        if before is not None and load.state != before:
            load.state = None  # they changed while they were loaded
        with self._lock:
            if known is None:
                self._known[key] = _History(load, {load.digest})
                return load
            if load.digest == known.load.digest and load.state is not None and known.load.state is not None:
                load.word = known.load.word
            elif load.digest in known.digests:
                load.word = f"{load.digest} {self._nonce()}"
            known.load = load
            known.digests.add(load.digest)
        return load

    def _load_of(self, adapter: Adapter) -> Load | None:
        """None: the engine has something else under this number."""
        key = (adapter.adapter_id, adapter.name)
        with self._lock:
            known = self._known.get(key)
        if known is None:  # nobody asked for it beforehand, so that this request has it loaded
            load = self._read(adapter.path)
            with self._lock:
                known = self._known.setdefault(key, _History(load, {load.digest}))
        return known.load if known.load.path == adapter.path else None

    def _read(self, path: str) -> Load:
        before = self._files.state(path)
        digest = self._files.digest(path)
        state = before if digest is not None and self._files.state(path) == before else None
        return Load(path, state, digest or "", digest or "", self._monotonic())

    def _unchanged(self, load: Load) -> bool:
        """Whether the files are those that were loaded."""
        if load.state is None:
            return False
        if not load.settled:
            now_s = self._monotonic()
            if self._files.digest(load.path) != load.digest:
                load.state = None
                return False
            load.settled = now_s - load.read_s >= SETTLE_S
        return self._files.state(load.path) == load.state

    def _warn(self, adapter: Adapter) -> None:
        with self._lock:
            if adapter.name in self._warned:
                return
            self._warned.add(adapter.name)
        logger.warning(
            "adapter %s: the files in %s are not those that were loaded, or cannot be read; nothing that it computes "
            "is used again until it is loaded anew",
            adapter.name,
            adapter.path,
        )
