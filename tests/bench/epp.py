# SPDX-License-Identifier: Apache-2.0
"""Requests per second through Envoy with our picker, beside a picker that answers a constant.

    python tests/bench/epp.py [--seconds 5] [--rounds 3] [--connections 16] [--sizes 2048 32768] [--text]
                                 [--request-only] [--latency]

Envoy, its backends (``direct_response`` of the same Envoy), ``wrk`` and the picker share the machine. The constant
picker is the least that grpc.aio needs for the same messages: it joins the body, names one endpoint, sends the body
back and passes the answer. Ours does all of its work: tenants, parsing, the index (the workers publish the prompts'
blocks), a plan, records, usage of the answer; with ``--text`` token ids too, by a local tokenizer. Rounds alternate, so that both see the same
machine; beside requests per second stands the picker's own CPU time per request, which a busy machine changes less.
With ``--latency`` requests then come at half of our rate, at random times (``paced_load.py``), through an Envoy without
a picker and with each of both; what a picker adds is the difference of the percentiles.
Needs ``wrk`` and the ``test`` extra.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import aiohttp
import grpc
from envoy.config.core.v3 import base_pb2
from envoy.service.ext_proc.v3 import external_processor_pb2 as pb
from envoy.service.ext_proc.v3 import external_processor_pb2_grpc
from tokenizers import Tokenizer

sys.path.insert(0, str(Path(__file__).parent.parent / "support"))

from envoy_proxy import EnvoySettings, bootstrap
from kv_batches import batch, stored
from kv_publisher import ScriptedEngine

PACED = Path(__file__).parent.parent / "support/paced_load.py"
TOKENIZER = Path(__file__).parent.parent / "golden/chat_templates/tokenizer"
MODEL = "bench"
BLOCK = 16
BODIES = 64
DESTINATION = "x-gateway-destination-endpoint"
ANSWER = json.dumps(
    {
        "id": "cmpl-1",
        "object": "text_completion",
        "model": MODEL,
        "choices": [{"index": 0, "text": "x" * 64, "finish_reason": "length"}],
        "usage": {
            "prompt_tokens": 500,
            "completion_tokens": 16,
            "total_tokens": 516,
            "prompt_tokens_details": {"cached_tokens": 480},
        },
    }
)


# The constant picker


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
    server = grpc.aio.server()
    external_processor_pb2_grpc.add_ExternalProcessorServicer_to_server(Constant(endpoint), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    print(json.dumps({"grpc": f"127.0.0.1:{port}"}), flush=True)
    await server.wait_for_termination()


# The scene


def bodies(size: int, *, text: bool) -> tuple[list[str], list[list[int]]]:
    """Request bodies of about ``size`` bytes with a text or with token ids, and the ids of their prompts."""
    tokenizer = Tokenizer.from_file(str(TOKENIZER / "tokenizer.json"))
    chance = random.Random(size)
    words = ["the", "man", "is", "on", "bus", "where", "switch", "points", "rail", "yard", "night", "light"]
    lines, prompts = [], []
    for _ in range(BODIES):
        prompt: Any = ""
        while len(prompt) < size - 60:
            prompt += chance.choice(words) + " "
        ids = tokenizer.encode(prompt).ids
        if not text:
            ids = [chance.randrange(1000, 100_000) for _ in range(size // 7)]
            prompt = ids
        prompts.append(ids)
        lines.append(json.dumps({"model": MODEL, "prompt": prompt, "max_tokens": 16}))
    return lines, prompts


def publish(engine: ScriptedEngine, prompts: Sequence[Sequence[int]]) -> None:
    """The blocks of these prompts are in the worker's HBM."""
    name = 1
    for ids in prompts:
        count = len(ids) // BLOCK
        if count:
            names = list(range(name, name + count))
            engine.batch(batch(stored(names, ids[: count * BLOCK], block_size=BLOCK)))
            name += count


def backend(name: str) -> dict[str, Any]:
    """A worker as the picker polls it, that answers every call alike."""
    metrics = f'vllm:num_requests_running 0\nvllm:num_requests_waiting 0\nvllm:cache_config_info{{block_size="{BLOCK}"}} 1\n'
    models = json.dumps(
        {"object": "list", "data": [{"id": MODEL, "object": "model", "max_model_len": 131072}]}
    )

    def route(prefix: str, text: str, kind: str) -> dict[str, Any]:
        return {
            "match": {"prefix": prefix},
            "direct_response": {"status": 200, "body": {"inline_string": text}},
            "response_headers_to_add": [{"header": {"key": "content-type", "value": kind}}],
        }

    routes = [
        route("/metrics", metrics, "text/plain"),
        route("/v1/models", models, "application/json"),
        route("/v1/", ANSWER, "application/json"),
        route("/", "{}", "application/json"),
    ]
    manager = {
        "@type": "type.googleapis.com/envoy.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager",
        "stat_prefix": name,
        "route_config": {"virtual_hosts": [{"name": "all", "domains": ["*"], "routes": routes}]},
        "http_filters": [{"name": "router", "typed_config": {"@type": "type.googleapis.com/envoy.extensions.filters.http.router.v3.Router"}}],
    }  # fmt: skip
    return {
        "name": name,
        "address": {"socket_address": {"address": "127.0.0.1", "port_value": 0}},
        "filter_chains": [{"filters": [{"name": "http", "typed_config": manager}]}],
    }


@contextlib.contextmanager
def started(command: Sequence[str], home: Path, **more: str) -> Iterator[subprocess.Popen[bytes]]:
    environment = {**os.environ, "XDG_STATE_HOME": str(home), **more}
    with (home / "log").open("ab") as log:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, env=environment)
        try:
            yield process
        finally:
            process.kill()
            process.wait()


def told(process: subprocess.Popen[bytes]) -> dict[str, str]:
    assert process.stdout is not None
    line: dict[str, str] = json.loads(process.stdout.readline())
    return line


@contextlib.asynccontextmanager
async def envoy(config: dict[str, Any], home: Path, name: str) -> AsyncIterator[dict[str, str]]:
    """Addresses of an Envoy's listeners by name."""
    file, admin = home / f"{name}.json", home / f"{name}.admin"
    file.write_text(json.dumps(config))
    command = [str(Path(sys.executable).with_name("envoy")), "-c", str(file), "--disable-hot-restart"]
    command += ["--concurrency", "1", "--admin-address-path", str(admin), "-l", "error"]
    with started(command, home):
        async with aiohttp.ClientSession() as session:
            while True:
                with contextlib.suppress(OSError, aiohttp.ClientError):
                    async with session.get(f"http://{admin.read_text()}/listeners?format=json") as answer:
                        rows = json.loads(await answer.text()).get("listener_statuses", [])
                    if rows:
                        break
                await asyncio.sleep(0.05)
        yield {
            row["name"]: f"127.0.0.1:{row['local_address']['socket_address']['port_value']}" for row in rows
        }


def cpu_s(process: subprocess.Popen[bytes]) -> float:
    fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def load(url: str, file: Path, connections: int, seconds: float) -> tuple[int, float, float]:
    """(requests, requests per second, median latency in ms), or an error where an answer was none."""
    host = url.removeprefix("http://")
    script = (
        "local bodies, at = {}, 0\n"
        f'local headers = {{["content-type"] = "application/json", ["Host"] = "{host}"}}\n'
        f'for line in io.lines("{file}") do\n'
        '  bodies[#bodies + 1] = wrk.format("POST", "/v1/completions", headers, line)\nend\n'
        "function request() at = at % #bodies + 1; return bodies[at] end\n"
    )
    lua = file.with_suffix(".lua")
    lua.write_text(script)
    command = ["wrk", "-t1", f"-c{connections}", f"-d{seconds}s", "--latency", "-s", str(lua), url]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    if "Non-2xx" in text or "Socket errors" in text:
        raise SystemExit(f"{url}\n{text}")
    total = re.search(r"(\d+) requests in", text)
    rate = re.search(r"Requests/sec:\s+([\d.]+)", text)
    median = re.search(r"50%\s+([\d.]+)(us|ms|s)", text)
    assert total is not None
    assert rate is not None
    assert median is not None
    factor = {"us": 1e-3, "ms": 1.0, "s": 1e3}[median[2]]
    return int(total[1]), float(rate[1]), float(median[1]) * factor


def without_picker(config: Mapping[str, Any]) -> dict[str, Any]:
    """The same Envoy, that asks nobody."""
    plain: dict[str, Any] = json.loads(json.dumps(config))
    for listener in plain["static_resources"]["listeners"]:
        manager = listener["filter_chains"][0]["filters"][0]["typed_config"]
        manager["http_filters"] = [one for one in manager["http_filters"] if "ext_proc" not in one["name"]]
    return plain


def compare_latency(args: argparse.Namespace, urls: Mapping[str, str], file: Path, rate: float) -> None:
    """Print what each picker adds at so many requests per second; rounds alternate."""
    rows: dict[str, list[tuple[float, float]]] = {name: [] for name in ("none", "constant", "ours")}
    for _ in range(args.rounds):
        for name, found in rows.items():
            print(f"paced {name}", end="\r", file=sys.stderr)
            command = [sys.executable, str(PACED), urls[name], str(file), f"{rate:.1f}", str(args.seconds)]
            told = json.loads(subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout)
            found.append((told["p50_ms"], told["p99_ms"]))
    p50, p99 = ({name: statistics.median(row[column] for row in found) for name, found in rows.items()} for column in (0, 1))  # fmt: skip
    for name in ("constant", "ours"):
        print(
            f"       at {rate:.0f} req/s {name} adds p50 {p50[name] - p50['none']:.2f} ms, "
            f"p99 {p99[name] - p99['none']:.2f} ms (without a picker {p50['none']:.2f} and {p99['none']:.2f} ms)"
        )


async def measure(args: argparse.Namespace, home: Path) -> None:
    engines = [ScriptedEngine(), ScriptedEngine()]
    files, held = {}, {}
    for size in args.sizes:
        lines, held[size] = bodies(size, text=args.text)
        files[size] = home / f"{size}.txt"
        files[size].write_text("\n".join(lines) + "\n")
    backends = {
        "admin": {"address": {"socket_address": {"address": "127.0.0.1", "port_value": 0}}},
        "static_resources": {"listeners": [backend("one"), backend("two")]},
    }
    response = "NONE" if args.request_only else "FULL_DUPLEX_STREAMED"
    async with contextlib.AsyncExitStack() as stack:
        workers = list((await stack.enter_async_context(envoy(backends, home, "backends"))).values())
        constant = stack.enter_context(started([sys.executable, __file__, "--constant", workers[0]], home))
        command = [sys.executable, "-P", "-m", "router", "epp", "-c", str(home / "pointsman.yaml")]
        (home / "pointsman.yaml").write_text(
            json.dumps(
                {
                    "epp": {"host": "127.0.0.1", "grpc_port": 0, "health_port": 0, "http_port": 0},
                    "tokens": {"local": [{"model": MODEL, "path": str(TOKENIZER)}], "probe": False},
                    "fleet": {
                        "workers": [
                            {"url": f"http://{worker}", "events": engine.events, "replay": engine.replay}
                            for worker, engine in zip(workers, engines, strict=True)
                        ]
                    },
                }
            )
        )
        ours = stack.enter_context(started(command, home))
        pickers = {"constant": (constant, told(constant)["grpc"]), "ours": (ours, told(ours)["grpc"])}
        urls = {}
        for name, (_, address) in pickers.items():
            config = dict(bootstrap(address, workers, EnvoySettings(response_mode=response)))
            urls[name] = (await stack.enter_async_context(envoy(config, home, f"front-{name}")))["front"]
        if args.latency:
            config = without_picker(bootstrap(pickers["ours"][1], workers, EnvoySettings()))
            urls["none"] = (await stack.enter_async_context(envoy(config, home, "front-none")))["front"]
        for number, engine in enumerate(engines):
            await asyncio.to_thread(engine.wait_for_subscriber)
            for prompts in held.values():
                publish(engine, prompts[number::2])
        print(
            f"{'bytes':>6} {'picker':>9} {'req/s':>8} {'CPU us/req':>11} {'p50 ms':>7}   (medians of {args.rounds})"
        )
        for size in args.sizes:
            rows: dict[str, list[tuple[float, float, float]]] = {name: [] for name in pickers}
            for number in range(args.rounds + 1):
                for name, (process, _) in pickers.items():
                    print(f"{size} {name} {number}", end="\r", file=sys.stderr)
                    before = cpu_s(process)
                    seconds = args.seconds if number else 1
                    count, rate, p50 = await asyncio.to_thread(
                        load, f"http://{urls[name]}", files[size], args.connections, seconds
                    )
                    if number:  # the first round warms up
                        rows[name].append((rate, (cpu_s(process) - before) / count * 1e6, p50))
            medians = {name: [statistics.median(column) for column in zip(*found, strict=True)] for name, found in rows.items()}  # fmt: skip
            for name, (rate, cpu_us, p50) in medians.items():
                print(f"{size:>6} {name:>9} {rate:>8.0f} {cpu_us:>11.0f} {p50:>7.2f}")
            print(
                f"       ours / constant: {medians['ours'][0] / medians['constant'][0]:.2f} of its requests, "
                f"{medians['ours'][1] / medians['constant'][1]:.2f} of its CPU time"
            )
            if args.latency:
                await asyncio.to_thread(compare_latency, args, urls, files[size], medians["ours"][0] / 2)
    for engine in engines:
        engine.close()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--connections", type=int, default=16)
    parser.add_argument("--sizes", type=int, nargs="+", default=[2048, 32768])
    parser.add_argument("--request-only", action="store_true", help="Envoy does not show answers' bodies")
    parser.add_argument("--latency", action="store_true", help="what a picker adds at half of our rate, too")
    parser.add_argument("--text", action="store_true", help="prompts as text, tokenised by the picker")
    parser.add_argument("--constant", metavar="IP:PORT", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.constant:
        asyncio.run(serve_constant(args.constant))
        return
    if shutil.which("wrk") is None:
        raise SystemExit("wrk is not installed")
    with tempfile.TemporaryDirectory(prefix="pointsman-epp-") as home:
        asyncio.run(measure(args, Path(home)))


if __name__ == "__main__":
    main()
