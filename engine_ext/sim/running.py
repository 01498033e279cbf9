# SPDX-License-Identifier: Apache-2.0
"""A simulated worker as a running server: options in, addresses out; in a process of its own or inside another."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field

import uvicorn
import zmq

from engine_ext.sim.api import ServedModel
from engine_ext.sim.chat import load_template
from engine_ext.sim.config import SimConfig
from engine_ext.sim.connection import CuttableProtocol
from engine_ext.sim.core import SimEngine
from engine_ext.sim.errors import SimConfigError
from engine_ext.sim.events import EventEncoding, HashKind
from engine_ext.sim.profile import load_profile
from engine_ext.sim.server import SimApp
from engine_ext.sim.tokenizer import make_tokenizer
from engine_ext.sim.worker import SimWorker, Sockets


@dataclass(frozen=True, slots=True, kw_only=True)
class SimWorkerOptions:
    """Everything ``pointsman sim-worker`` can be told. Port 0 takes a free one."""

    host: str = "127.0.0.1"
    port: int = 0
    events: str | None = "tcp://127.0.0.1:0"
    replay: str | None = "tcp://127.0.0.1:0"
    p2p_port: int | None = None
    topic: str = ""
    profile: str = "default"
    time_scale: float = 1.0
    """Everything takes this many times less time than in the profile."""
    model: str = "sim-model"
    loras: tuple[str, ...] = ()
    tokenizer: str | None = None
    event_encoding: EventEncoding = EventEncoding.MAP
    hash_kind: HashKind = HashKind.INT
    engine: SimConfig = field(default_factory=SimConfig)


@dataclass(frozen=True, slots=True)
class RunningSimWorker:
    """Addresses at which a running worker can be reached, and its insides."""

    url: str
    events: str | None
    replay: str | None
    p2p: str | None
    """``host:port``."""
    worker: SimWorker

    @property
    def engine(self) -> SimEngine:
        """The engine of the current incarnation."""
        return self.worker.engine

    def addresses(self) -> dict[str, str | None]:
        """What ``pointsman sim-worker`` prints."""
        return {"http": self.url, "events": self.events, "replay": self.replay, "p2p": self.p2p}


class _Server(uvicorn.Server):
    """Uvicorn inside somebody else's event loop: signals are not its business."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.ready = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Accept connections from now on."""
        await super().startup(sockets)
        self.ready.set()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals alone."""
        yield


@contextlib.asynccontextmanager
async def running_sim_worker(options: SimWorkerOptions) -> AsyncIterator[RunningSimWorker]:
    """Run a worker until the block ends; its requests are cut off then.

    Raises:
        SimConfigError: an option is wrong, or an address cannot be bound.
    """
    worker, app = _build(options)
    listener = _listen(options)
    config = uvicorn.Config(
        app,
        http=CuttableProtocol,
        lifespan="off",
        log_config=None,
        access_log=False,
        timeout_graceful_shutdown=1,
    )
    server = _Server(config)
    async with contextlib.AsyncExitStack() as stack:
        stack.callback(listener.close)
        stack.push_async_callback(worker.close)
        try:
            await worker.open()
        except (OSError, zmq.ZMQError) as error:
            raise SimConfigError(
                "events, replay or p2p_port", str(error), "addresses that are free"
            ) from error
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        try:
            await server.ready.wait()
            yield _addresses(options, worker, listener.getsockname()[1])
        finally:
            worker.end_requests()
            app.release_stalled()
            server.should_exit = True
            await serving


def _listen(options: SimWorkerOptions) -> socket.socket:
    try:
        listener = socket.create_server((options.host, options.port), backlog=1024)
        # Inherited by its connections; asyncio does this itself only where the protocol number says TCP.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return listener
    except (OSError, OverflowError) as error:
        raise SimConfigError("port", options.port, f"a free port of {options.host} ({error})") from error


def _build(options: SimWorkerOptions) -> tuple[SimWorker, SimApp]:
    profile = load_profile(options.profile).scaled(options.time_scale)
    tokenizer = make_tokenizer(options.tokenizer)
    config = _with_vocabulary(options.engine, tuple(tokenizer.output_vocabulary))
    sockets = Sockets(
        host=options.host,
        events=options.events,
        replay=options.replay,
        p2p_port=options.p2p_port,
        topic=options.topic,
    )
    worker = SimWorker(config, profile, sockets, options.event_encoding, options.hash_kind)
    model = ServedModel(options.model, options.loras, worker.engine.max_model_len)
    return worker, SimApp(worker, model, tokenizer, load_template(options.tokenizer))


def _with_vocabulary(config: SimConfig, vocabulary: tuple[int, ...]) -> SimConfig:
    values = {name: getattr(config, name) for name in SimConfig.__slots__}
    return SimConfig(**{**values, "output_vocabulary": vocabulary})


def _addresses(options: SimWorkerOptions, worker: SimWorker, port: int) -> RunningSimWorker:
    host = "127.0.0.1" if options.host in ("0.0.0.0", "::", "") else options.host
    publisher, p2p = worker.publisher, worker.peers.port

    def tcp(bound: int | None) -> str | None:
        return None if bound is None else f"tcp://{host}:{bound}"

    return RunningSimWorker(
        url=f"http://{host}:{port}",
        events=tcp(publisher.events_port),
        replay=tcp(publisher.replay_port),
        p2p=None if p2p is None else f"{host}:{p2p}",
        worker=worker,
    )
