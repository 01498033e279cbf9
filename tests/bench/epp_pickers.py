# SPDX-License-Identifier: Apache-2.0
"""The pickers of ``epp.py`` as processes. Both print a JSON line with their address.

    python tests/bench/epp_pickers.py constant IP:PORT    one endpoint for everything, on grpc.aio
    python tests/bench/epp_pickers.py timed FILE          ``pointsman epp -c FILE``, which looks at its own time

The timed one prints, on SIGUSR1, what it saw since the last time: for each request the time from the read that brought
the last byte of it to the write of its endpoint, by the clock and in CPU time, and the pauses of the collector. What
waits in a socket before it is read is not in it.
"""

from __future__ import annotations

import asyncio
import gc
import json
import signal
import sys
import time
from collections.abc import Sequence
from typing import Any

import grpc
from envoy.config.core.v3 import base_pb2
from envoy.service.ext_proc.v3 import external_processor_pb2 as pb
from envoy.service.ext_proc.v3 import external_processor_pb2_grpc

from router.cli import run
from router.extproc.http2 import server
from router.extproc.http2.grpc import Call
from router.extproc.messages import Answer
from router.extproc.service import Exchange, ExternalProcessor

DESTINATION = "x-gateway-destination-endpoint"


class Constant(external_processor_pb2_grpc.ExternalProcessorServicer):  # type: ignore[misc]
    """One endpoint for everything."""

    def __init__(self, endpoint: str) -> None:
        self._endpoint = endpoint

    async def Process(self, _requests: Any, context: Any) -> None:  # noqa: N802
        body = bytearray()
        while (message := await context.read()) is not grpc.aio.EOF:
            kind = message.WhichOneof("request")
            if kind == "request_headers" and message.request_headers.end_of_stream:
                await context.write(self._routed())
            elif kind == "request_body":
                body += message.request_body.body
                if message.request_body.end_of_stream:
                    await context.write(self._routed())
                    await self._pieces(context, bytes(body), "request_body", end=True)
            elif kind == "response_headers":
                answer = pb.ProcessingResponse()
                answer.response_headers.SetInParent()
                await context.write(answer)
            elif kind == "response_body":
                part = message.response_body
                await self._pieces(context, part.body, "response_body", end=part.end_of_stream)

    def _routed(self) -> Any:
        answer = pb.ProcessingResponse()
        common = answer.request_headers.response
        common.clear_route_cache = True
        option = common.header_mutation.set_headers.add()
        option.append_action = base_pb2.HeaderValueOption.OVERWRITE_IF_EXISTS_OR_ADD
        option.header.key, option.header.raw_value = DESTINATION, self._endpoint.encode()
        answer.dynamic_metadata.get_or_create_struct("envoy.lb").update({DESTINATION: self._endpoint})
        return answer

    @staticmethod
    async def _pieces(context: Any, data: bytes, kind: str, *, end: bool) -> None:
        for start in range(0, max(len(data), 1), 62_000):
            answer = pb.ProcessingResponse()
            part = getattr(answer, kind).response.body_mutation.streamed_response
            part.body = data[start : start + 62_000]
            part.end_of_stream = end and start + 62_000 >= len(data)
            await context.write(answer)


async def serve_constant(endpoint: str) -> None:
    served = grpc.aio.server()
    external_processor_pb2_grpc.add_ExternalProcessorServicer_to_server(Constant(endpoint), served)
    port = served.add_insecure_port("127.0.0.1:0")
    await served.start()
    print(json.dumps({"grpc": f"127.0.0.1:{port}"}), flush=True)
    await served.wait_for_termination()


class Watch:
    """What the timed picker saw of itself."""

    def __init__(self) -> None:
        self.read_at = (0.0, 0.0)
        """The clock and this thread's CPU time at the last read."""
        self.answered: list[tuple[float, float]] = []
        """Of requests whose answers are not written yet: when the read came that made them whole."""
        self.wall_s: list[float] = []
        self.cpu_s: list[float] = []
        self.pauses_s: list[float] = []

    def now(self) -> tuple[float, float]:
        return time.perf_counter(), time.thread_time()

    def wrote(self) -> None:
        if self.answered:
            wall, cpu = self.now()
            self.wall_s += [wall - began for began, _ in self.answered]
            self.cpu_s += [cpu - began for _, began in self.answered]
            self.answered.clear()

    def tell(self) -> None:
        print(json.dumps({"wall_s": self.wall_s, "cpu_s": self.cpu_s, "pauses_s": self.pauses_s}), flush=True)
        self.wall_s, self.cpu_s, self.pauses_s = [], [], []


def watched(watch: Watch) -> type[Exchange]:
    """Have sockets and streams tell ``watch``."""
    wire = server._Wire
    receive, flush = wire.data_received, wire._flush

    def data_received(self: Any, data: bytes) -> None:
        watch.read_at = watch.now()
        receive(self, data)

    def flushed(self: Any) -> None:
        flush(self)
        watch.wrote()

    wire.data_received, wire._flush = data_received, flushed  # type: ignore[method-assign]

    class Watched(Exchange):
        __slots__ = ("read_at",)

        def __init__(self, processor: ExternalProcessor, call: Call) -> None:
            super().__init__(processor, call)
            self.read_at: tuple[float, float] | None = watch.read_at

        def message(self, data: bytes) -> None:
            if self.read_at is not None:
                self.read_at = watch.read_at
            super().message(data)

        def _answer(self, answers: Sequence[Answer]) -> None:
            super()._answer(answers)
            if answers and self.read_at is not None:
                watch.answered.append(self.read_at)
                self.read_at = None

    return Watched


def serve_timed(file: str) -> int:
    watch = Watch()
    exchange = watched(watch)

    def made(processor: ExternalProcessor, call: Call) -> Exchange:
        return exchange(processor, call)

    ExternalProcessor.exchange = made  # type: ignore[method-assign]
    began_s = 0.0

    def collected(phase: str, _: object) -> None:
        nonlocal began_s
        if phase == "start":
            began_s = time.perf_counter()
        else:
            watch.pauses_s.append(time.perf_counter() - began_s)

    gc.callbacks.append(collected)
    signal.signal(signal.SIGUSR1, lambda *_: watch.tell())
    return run(["epp", "-c", file])


if __name__ == "__main__":
    if sys.argv[1] == "constant":
        asyncio.run(serve_constant(sys.argv[2]))
    else:
        sys.exit(serve_timed(sys.argv[2]))
