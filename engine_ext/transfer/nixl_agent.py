# SPDX-License-Identifier: Apache-2.0
"""The transfer library: NIXL's native agent behind the seams of agent.py. The only file that imports nixl.

It uses the binding module below NIXL's Python class, since that class fixes the progress thread's delay to zero (one
core spinning per agent) and frees handles behind its user's back. Written against nixl 1.5.

What NIXL 1.5 with UCX does, found by trying it:

- releasing the handle of a running transfer "succeeds" and leaves the reads under way; they land later;
- `add_remote_agent` on damaged metadata can crash the process, so a handshake carries a digest;
- a READ over shared memory (CMA) is copied inside the call that posts it; over TCP it needs the source's progress;
- a failed connection shows as an exception from post or check, never as the status "error";
- destroying an agent with reads pending to a peer that is frozen is safe here. Over TCP the peer, once it thaws,
  aborts inside UCX when it answers a read whose reader is gone (so does it if the reader was killed).
"""

from __future__ import annotations

import contextlib
import importlib
import weakref
from collections.abc import Callable, Iterator
from typing import Any

from .agent import PeerOffer, Posted, TransferState
from .config import TransferConfig
from .errors import AgentError, PeerGoneError
from .region import Region

MAX_AGENT_NAME_CHARS = 200


class _Agent:
    """A native agent with its backends, and the region registered with each of them."""

    def __init__(self, name: str, config: TransferConfig, region: Region, *, progress_thread: bool) -> None:
        self.name = name
        self.region = region
        self._lib = _bindings()
        self.native: Any = None
        """The library's own; only this attribute refers to it for longer than a call."""
        self._gone: Callable[[], Any] | None = None
        self._backends: dict[str, int] = {}
        self._registered: list[tuple[Any, int]] = []
        try:
            self._open(config, progress_thread)
        except AgentError:
            self.abandon()
            raise

    def _open(self, config: TransferConfig, progress_thread: bool) -> None:
        lib = self._lib
        settings = lib.nixlAgentConfig()
        settings.useProgThread = progress_thread
        settings.useListenThread = False
        settings.syncMode = lib.nixl_thread_sync_t.NIXL_THREAD_SYNC_NONE
        settings.pthrDelay = round(config.progress_interval_s * 1e6)
        settings.captureTelemetry = False
        with self._errors("create agent"):
            self.native = lib.nixlAgent(self.name, settings)
        for backend in config.backends:
            options = config.backend_options.get(backend, {})
            with self._errors(f"create backend {backend}"):
                self._backends[backend] = self.native.createBackend(backend, options)
        kind = lib.DRAM_SEG if self.region.memory == "DRAM" else lib.VRAM_SEG
        whole = (self.region.base_address, self.region.size_bytes, 0, "")
        for backend, handle in self._backends.items():
            descriptors = lib.nixlRegDList(kind, [whole])
            with self._errors(f"register with {backend}"):
                self.native.registerMem(descriptors, [handle])
            self._registered.append((descriptors, handle))

    @property
    def lib(self) -> Any:
        return self._lib

    @property
    def backend_handles(self) -> list[int]:
        return list(self._backends.values())

    @property
    def backend_names(self) -> tuple[str, ...]:
        return tuple(self._backends)

    def blocks_of(self, region: Region) -> tuple[Any, Any]:
        """The blocks of a region as one strided descriptor: (memory kind, 1x5 array)."""
        numpy = importlib.import_module("numpy")  # a dependency of nixl's, not of ours
        row = [region.base_address, region.block_bytes, 0, region.block_bytes, region.blocks]
        kind = self._lib.DRAM_SEG if region.memory == "DRAM" else self._lib.VRAM_SEG
        return kind, numpy.array([row], dtype=numpy.uint64)

    def call(self, step: str, method: str, *args: Any) -> Any:
        """Calls a method of the native agent.

        Raises:
            PeerGoneError, AgentError
        """
        try:
            return getattr(self.native, method)(*args)
        except Exception as error:
            raise self.ours(step, error) from error

    @contextlib.contextmanager
    def _errors(self, step: str) -> Iterator[None]:
        """The library's exceptions become ours.

        No frame of their tracebacks may hold the native agent in a variable: `destroy` would find it referred to.
        """
        try:
            yield
        except Exception as error:
            raise self.ours(step, error) from error

    def ours(self, step: str, error: Exception) -> AgentError:
        gone = isinstance(error, self._lib.nixlRemoteDisconnectError)
        return (PeerGoneError if gone else AgentError)(step, f"{type(error).__name__}: {error}")

    def abandon(self) -> None:
        """Takes back what was made before a failure. No transfer was begun, so nothing has to be proved."""
        with contextlib.suppress(AgentError):
            self.destroy()

    def destroy(self) -> None:
        """Deregisters and destroys the native agent. May be called again after an error.

        Raises:
            AgentError: it still exists.
        """
        while self._registered:
            descriptors, handle = self._registered[-1]
            self.call("deregister", "deregisterMem", descriptors, [handle])
            self._registered.pop()
        if self.native is not None:
            self._gone = weakref.ref(self.native)
            # This was the last reference: the destructor joins its thread and closes its connections.
            self.native = None
        if self._gone is not None and self._gone() is not None:
            raise AgentError("destroy agent", "something still refers to it")


class NixlServingAgent:
    """Lets peers read the region. A thread of the library's answers them, also while this process is busy."""

    def __init__(self, boot_id: str, config: TransferConfig, region: Region) -> None:
        """Registers the region.

        Raises:
            AgentError: nothing is left behind.
        """
        self._agent = _Agent(f"pointsman-{boot_id}", config, region, progress_thread=True)
        self._boot_id = boot_id

    def offer(self) -> PeerOffer:
        """See ServingAgent."""
        agent = self._agent
        metadata = agent.call("metadata", "getLocalMD")
        return PeerOffer(self._boot_id, agent.name, metadata, agent.region, agent.backend_names)

    def forget_notifications(self) -> None:
        """Drops what readers that are not ours notified; the library keeps it for ever otherwise."""
        self._agent.call("notifications", "getNotifs", {}, [])

    def close(self) -> None:
        """See ServingAgent."""
        self._agent.destroy()


class NixlPullAgent:
    """Reads from peers; makes progress only when it is called. See PullAgent."""

    def __init__(self, name: str, config: TransferConfig, region: Region) -> None:
        """Registers the region.

        Raises:
            AgentError: nothing is left behind.
        """
        agent = self._agent = _Agent(name, config, region, progress_thread=False)
        lib = agent.lib
        self._done, self._running, self._read = lib.NIXL_SUCCESS, lib.NIXL_IN_PROG, lib.NIXL_READ
        self._disconnected = lib.nixlRemoteDisconnectError
        self._backends = agent.backend_handles
        self._peers: dict[str, tuple[str, int]] = {}
        self._handles: set[int] = set()
        """Of transfers that were not released."""
        self._lists: list[int] = []
        try:
            self._local = self._prepare(lib.NIXL_INIT_AGENT, region)
        except AgentError:
            agent.abandon()
            raise

    @property
    def native(self) -> Any:
        """The library's own agent, for measurements beside it."""
        return self._agent.native

    @property
    def library(self) -> Any:
        """The library's binding module."""
        return self._agent.lib

    def add_peer(self, offer: PeerOffer) -> None:
        agent = self._agent
        name = agent.call("load metadata", "loadRemoteMD", offer.metadata)
        try:
            if name != offer.agent_name.encode():
                raise AgentError("load metadata", f"it is of agent {name!r}, not {offer.agent_name!r}")
            blocks = self._prepare(offer.agent_name, offer.region)
        except AgentError:
            self._quietly("invalidateRemoteMD", name)
            raise
        self._peers[offer.boot_id] = (offer.agent_name, blocks)

    def remove_peer(self, boot_id: str) -> None:
        name, blocks = self._peers.pop(boot_id)
        self._lists.remove(blocks)
        self._quietly("releasedDlistH", blocks)
        # After a disconnect NIXL has dropped the peer by itself and finds nothing here.
        self._quietly("invalidateRemoteMD", name)

    def post(self, boot_id: str, source: list[int], destination: list[int]) -> Posted:
        handle = self.make(boot_id, source, destination)
        state = self._state(self._agent.native.postXferReq, handle)
        if state is TransferState.DONE:
            self.release(handle)
        return handle, state

    def make(self, boot_id: str, source: list[int], destination: list[int], notification: str = "") -> int:
        """A transfer that was not begun; the source is notified when it is over, if there is something to say.

        Raises:
            PeerGoneError, AgentError: as `post`.
        """
        agent = self._agent
        peer = self._peers[boot_id][1]
        try:
            handle: int = agent.native.makeXferReq(
                self._read, self._local, destination, peer, source, notification, self._backends
            )
        except Exception as error:
            raise agent.ours("make transfer", error) from error
        self._handles.add(handle)
        return handle

    def check(self, handle: int) -> TransferState:
        return self._state(self._agent.native.getXferStatus, handle)

    def release(self, handle: int) -> None:
        self._handles.discard(handle)
        try:
            self._agent.native.releaseXferReq(handle)
        except Exception:  # as _quietly, which takes longer
            return

    def progress(self) -> None:
        self._quietly("getNotifs", {}, [])

    def close(self) -> None:
        for handle in list(self._handles):
            self.release(handle)
        for boot_id in list(self._peers):
            self.remove_peer(boot_id)
        for blocks in self._lists:
            self._quietly("releasedDlistH", blocks)
        self._lists.clear()
        self._agent.destroy()

    def _state(self, function: Callable[[int], Any], handle: int) -> TransferState:
        try:
            status = function(handle)
        except self._disconnected:
            return TransferState.GONE
        except Exception:  # any other error of the library: it says nothing of reads under way
            return TransferState.UNKNOWN
        if status == self._done:
            return TransferState.DONE
        return TransferState.RUNNING if status == self._running else TransferState.UNKNOWN

    def _prepare(self, name: str, region: Region) -> int:
        kind, blocks = self._agent.blocks_of(region)
        prepared: int = self._agent.call(
            "prepare blocks", "prepXferDlist", name, kind, blocks, self._backends
        )
        self._lists.append(prepared)
        return prepared

    def _quietly(self, method: str, *args: Any) -> None:
        """For steps that only free something: what cannot be freed now goes when the agent is destroyed."""
        with contextlib.suppress(Exception):
            getattr(self._agent.native, method)(*args)


class NixlPullAgents:
    """An AgentFactory."""

    def __init__(self, boot_id: str, config: TransferConfig, region: Region) -> None:
        self._boot_id = boot_id
        self._config = config
        self._region = region

    def __call__(self, number: int) -> NixlPullAgent:
        return NixlPullAgent(f"pointsman-{self._boot_id}-pull-{number}", self._config, self._region)


def _bindings() -> Any:
    try:
        nixl = importlib.import_module("nixl")
    except ImportError as error:
        raise AgentError("import nixl", str(error)) from error
    return nixl._bindings  # noqa: SLF001 - see the head of this file
