# SPDX-License-Identifier: Apache-2.0
"""The adapter's own promises, on a stand-in for the binding module where the real one cannot be made to fail."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest

from engine_ext.transfer.config import TransferConfig
from engine_ext.transfer.errors import AgentError, PeerGoneError
from engine_ext.transfer.nixl_agent import NixlServingAgent

from .scripted import BOOT_A, OURS

TWO_BACKENDS = TransferConfig(backends=("UCX", "LIBFABRIC"))


class Disconnected(Exception):
    pass


class Bindings:
    """As much of nixl's binding module as serving needs; remembers what is registered."""

    DRAM_SEG = "dram"
    NIXL_INIT_AGENT = ""
    nixlRemoteDisconnectError = Disconnected  # noqa: N815 - the binding's own name
    nixl_thread_sync_t = SimpleNamespace(NIXL_THREAD_SYNC_NONE=0)

    def __init__(self) -> None:
        self.registered: list[int] = []
        self.refuses: dict[int, Exception] = {}
        self.options: dict[str, dict[str, str]] = {}
        self.settings: Any = None

    def nixlAgentConfig(self) -> SimpleNamespace:  # noqa: N802
        self.settings = SimpleNamespace()
        return self.settings

    def nixlRegDList(self, kind: str, regions: list[tuple[int, int, int, str]]) -> object:  # noqa: N802
        return (kind, regions)

    def nixlAgent(self, name: str, settings: object) -> NativeAgent:  # noqa: N802
        return NativeAgent(self)


class NativeAgent:
    def __init__(self, bindings: Bindings) -> None:
        self.bindings = bindings
        self.backends = 0

    def createBackend(self, name: str, options: dict[str, str]) -> int:  # noqa: N802
        self.backends += 1
        self.bindings.options[name] = options
        return self.backends

    def registerMem(self, descriptors: object, backends: list[int]) -> None:  # noqa: N802
        if backends[0] in self.bindings.refuses:
            raise self.bindings.refuses[backends[0]]
        self.bindings.registered.append(backends[0])

    def deregisterMem(self, descriptors: object, backends: list[int]) -> None:  # noqa: N802
        self.bindings.registered.remove(backends[0])

    def getLocalMD(self) -> bytes:  # noqa: N802
        return b"metadata"


@pytest.fixture
def bindings(monkeypatch: pytest.MonkeyPatch) -> Bindings:
    one = Bindings()
    monkeypatch.setitem(sys.modules, "nixl", SimpleNamespace(_bindings=one))
    return one


def test_without_nixl_the_error_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "nixl", None)
    with pytest.raises(AgentError, match="import nixl"):
        NixlServingAgent(BOOT_A, TransferConfig(), OURS)


def test_the_region_is_registered_with_every_backend_and_the_progress_thread_pauses(
    bindings: Bindings,
) -> None:
    agent = NixlServingAgent(BOOT_A, TWO_BACKENDS, OURS)
    assert bindings.registered == [1, 2]
    assert bindings.settings.pthrDelay == 5000
    assert agent.offer().backends == ("UCX", "LIBFABRIC")
    agent.close()
    assert bindings.registered == []


def test_each_backend_gets_its_own_options(bindings: Bindings) -> None:
    options = {"UCX": {"num_workers": "2"}}
    NixlServingAgent(BOOT_A, TransferConfig(backends=("UCX", "LIBFABRIC"), backend_options=options), OURS)
    assert bindings.options == {"UCX": {"num_workers": "2"}, "LIBFABRIC": {}}


def test_a_failed_registration_takes_back_the_ones_before_it(bindings: Bindings) -> None:
    bindings.refuses[2] = RuntimeError("locked memory limit")
    with pytest.raises(AgentError, match="register with LIBFABRIC: RuntimeError: locked memory limit"):
        NixlServingAgent(BOOT_A, TWO_BACKENDS, OURS)
    assert bindings.registered == []


def test_a_lost_connection_has_an_error_of_its_own(bindings: Bindings) -> None:
    bindings.refuses[1] = Disconnected()
    with pytest.raises(PeerGoneError):
        NixlServingAgent(BOOT_A, TransferConfig(), OURS)


def test_an_agent_that_something_else_holds_does_not_count_as_destroyed(
    bindings: Bindings, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[NativeAgent] = []
    monkeypatch.setattr(bindings, "nixlAgent", lambda *_: made.append(NativeAgent(bindings)) or made[-1])
    agent = NixlServingAgent(BOOT_A, TransferConfig(), OURS)
    with pytest.raises(AgentError, match="still refers"):
        agent.close()
    made.clear()
    agent.close()
