# SPDX-License-Identifier: Apache-2.0
"""The control channel's sockets: a ROUTER that serves, a DEALER per peer, and a way to wake whoever waits.

Everything is for one thread but `wake`. Nothing queues up for a peer that is not there: connections that are refused
or end are reported at once and closed by their user, queues have a high water mark, and closing drops what they hold.
"""

from __future__ import annotations

import contextlib
import functools
import operator
import socket
from dataclasses import dataclass

import zmq
from zmq.utils.monitor import recv_monitor_message

from engine_ext.transfer.errors import TransferConfigError

from .config import ControlConfig
from .curve import CurveKeys
from .wire import MAX_MESSAGE_BYTES

_ENDED: dict[int, str] = {
    zmq.EVENT_CONNECT_RETRIED: "no_connection: nobody takes it",
    zmq.EVENT_DISCONNECTED: "disconnected: the connection has ended",
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL: "not_zmq: no ZMQ handshake",
    zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL: "not_zmq: no ZMQ handshake",
    zmq.EVENT_HANDSHAKE_FAILED_AUTH: "authentication: it failed",
}
_EVENTS = functools.reduce(operator.or_, _ENDED)
_HIGH_WATER = 1024
_ROUND = 256
"""Messages that are taken from one socket before others have their turn."""
_CONNECT_TIMEOUT_MS = 2000
_FLUSH_MS = 200


@dataclass(frozen=True, slots=True)
class FromReader:
    route: bytes
    data: bytes


@dataclass(frozen=True, slots=True)
class FromSource:
    address: str
    data: bytes


@dataclass(frozen=True, slots=True)
class Lost:
    """A connection of ours was refused or has ended."""

    address: str
    detail: str


Received = FromReader | FromSource | Lost


@dataclass(slots=True, eq=False)
class _Line:
    address: str
    dealer: zmq.Socket[bytes]
    monitor: zmq.Socket[bytes]

    def close(self, linger_ms: int) -> None:
        self.dealer.disable_monitor()
        self.monitor.close(0)
        self.dealer.close(linger_ms)


class Sockets:
    """Bound from the start."""

    def __init__(self, config: ControlConfig, keys: CurveKeys | None) -> None:
        """Binds the ROUTER.

        Raises:
            TransferConfigError: the address cannot be bound; nothing is left behind.
        """
        self.malformed = 0
        """Messages of more than one frame."""
        self._keys = keys
        self._context = zmq.Context(io_threads=1)
        self._context.set(zmq.MAX_SOCKETS, 4 * config.max_peers + 64)
        self._poller = zmq.Poller()
        self._lines: dict[str, _Line] = {}
        self._owners: dict[object, _Line] = {}
        self._unsent: list[Lost] = []
        self._zap: zmq.Socket[bytes] | None = None
        self._waker, self._waiter = socket.socketpair()
        self._router = self._socket(zmq.ROUTER)
        try:
            self._bind(config)
        except zmq.ZMQError as error:
            self.close()
            where = f"{config.bind_host}:{config.port}"
            raise TransferConfigError("bind_host, port", where, f"an address to bind ({error})") from error
        for end in (self._waker, self._waiter):
            end.setblocking(False)
        self._poller.register(self._router, zmq.POLLIN)
        self._poller.register(self._waiter.fileno(), zmq.POLLIN)

    @property
    def port(self) -> int:
        return int(self._router.get_string(zmq.LAST_ENDPOINT).rsplit(":", 1)[1])

    @property
    def lines(self) -> int:
        """Connections of ours."""
        return len(self._lines)

    def wake(self) -> None:
        """Ends a `wait`, now or the next one. From any thread."""
        with contextlib.suppress(OSError):  # full: it wakes anyway; closed: nobody waits
            self._waker.send(b"\0")

    def wait(self, timeout_s: float | None) -> list[Received]:
        """What came; empty after the timeout, or when it was woken."""
        timeout_ms = None if timeout_s is None else int(timeout_s * 1000) + 1
        ready = dict(self._poller.poll(0 if self._unsent else timeout_ms))
        received: list[Received] = list(self._unsent)
        self._unsent.clear()
        if ready.pop(self._waiter.fileno(), None):
            with contextlib.suppress(BlockingIOError):
                self._waiter.recv(4096)
        if self._zap is not None and ready.pop(self._zap, None):
            self._admit(self._zap)
        if ready.pop(self._router, None):
            for frames in _drain(self._router):
                if len(frames) == 2:
                    received.append(FromReader(frames[0], frames[1]))
                else:
                    self.malformed += 1
        for one in ready:
            received.extend(self._from_line(one))
        return received

    def answer(self, route: bytes, data: bytes) -> None:
        """To a reader; dropped if it is gone or does not take its messages."""
        with contextlib.suppress(zmq.ZMQError):
            self._router.send_multipart([route, data], zmq.NOBLOCK)

    def send(self, address: str, data: bytes) -> None:
        """As Channel.send."""
        try:
            line = self._lines.get(address) or self._connect(address)
            line.dealer.send(data, zmq.NOBLOCK)
        except zmq.Again:
            self._unsent.append(Lost(address, "not_taking: it does not take its messages"))
        except zmq.ZMQError as error:
            self._unsent.append(Lost(address, f"bad_address: {error}"))

    def hang_up(self, address: str, *, flush: bool = False) -> None:
        """As Channel.hang_up."""
        line = self._lines.pop(address, None)
        if line is None:
            return
        for end in (line.dealer, line.monitor):
            self._owners.pop(end, None)
            self._poller.unregister(end)
        line.close(_FLUSH_MS if flush else 0)

    def close(self) -> None:
        """Waits a moment for what is to be flushed."""
        for address in list(self._lines):
            self.hang_up(address)
        if self._zap is not None:
            self._zap.close(0)
        self._router.close(_FLUSH_MS)
        self._context.term()
        self._waker.close()
        self._waiter.close()

    def _bind(self, config: ControlConfig) -> None:
        if self._keys is not None:
            self._keys.serve(self._router)
            if self._keys.clients:
                self._zap = self._context.socket(zmq.REP)
                self._zap.linger = 0
                self._zap.bind("inproc://zeromq.zap.01")
                self._poller.register(self._zap, zmq.POLLIN)
        self._router.bind(f"tcp://{config.bind_host}:{config.port or '*'}")

    def _socket(self, kind: int) -> zmq.Socket[bytes]:
        made = self._context.socket(kind)
        made.linger = 0
        made.sndhwm = made.rcvhwm = _HIGH_WATER
        made.maxmsgsize = MAX_MESSAGE_BYTES
        made.ipv6 = True
        made.set(zmq.TCP_KEEPALIVE, 1)
        made.set(zmq.TCP_KEEPALIVE_IDLE, 60)
        made.set(zmq.HANDSHAKE_IVL, 5000)
        return made

    def _connect(self, address: str) -> _Line:
        dealer = self._socket(zmq.DEALER)
        dealer.set(zmq.CONNECT_TIMEOUT, _CONNECT_TIMEOUT_MS)
        monitor = dealer.get_monitor_socket(_EVENTS)
        line = _Line(address, dealer, monitor)
        try:
            if self._keys is not None:
                self._keys.ask(dealer, address)
            dealer.connect(f"tcp://{address}")
        except zmq.ZMQError:
            line.close(0)
            raise
        self._lines[address] = line
        for end in (dealer, monitor):
            self._owners[end] = line
            self._poller.register(end, zmq.POLLIN)
        return line

    def _from_line(self, ready: object) -> list[Received]:
        line = self._owners[ready]
        if ready is line.dealer:
            messages = _drain(line.dealer)
            single = [FromSource(line.address, frames[0]) for frames in messages if len(frames) == 1]
            self.malformed += len(messages) - len(single)
            return list(single)
        lost: list[Received] = []
        with contextlib.suppress(zmq.Again):
            while True:
                event = recv_monitor_message(line.monitor, zmq.NOBLOCK)["event"]
                if event in _ENDED:
                    lost.append(Lost(line.address, _ENDED[event]))
        return lost[:1]

    def _admit(self, zap: zmq.Socket[bytes]) -> None:
        if self._keys is not None:
            zap.send_multipart(self._keys.admit(zap.recv_multipart()))


def _drain(one: zmq.Socket[bytes]) -> list[list[bytes]]:
    messages: list[list[bytes]] = []
    with contextlib.suppress(zmq.Again):
        while len(messages) < _ROUND:
            messages.append(one.recv_multipart(zmq.NOBLOCK))
    return messages
