# SPDX-License-Identifier: Apache-2.0
"""Requests per second through Envoy with our picker, beside a picker that answers a constant; and what each adds.

    python tests/bench/epp.py [--seconds 5] [--rounds 3] [--connections 16] [--sizes 2048 32768] [--text]
                              [--request-only] [--processes 1 2] [--latency [--rate N]] [--pin]

Envoy, its backends (``direct_response`` of the same Envoy), the client and the picker share the machine. The constant
picker is the least that grpc.aio needs for the same messages: it joins the body, names one endpoint, sends the body
back and passes the answer. Ours does all of its work: tenants, parsing, the index (the workers publish the prompts'
blocks), a plan, records, usage of the answer; with ``--text`` token ids too, by a local tokenizer. Rounds alternate, so
that all see the same machine; beside requests per second stands the CPU time per request of the picker (all of its
processes) and of Envoy, which a busy machine changes less.

``--processes`` compares several of our processes. Envoy then has as many threads as the most of them has processes:
each of its threads keeps a connection of its own to the picker, and a process serves whole connections.

``--latency``: requests come at half of our rate, or at ``--rate``, at random times that are the same for all
(``paced_load.py``), through an Envoy without a picker and with each of both. What a picker adds is the median over the
rounds of the difference to the run without one beside it. Shown too are what our picker itself takes from the last
byte of a request to its endpoint (``epp_pickers.py``), and the CPU time of each process, which says what the machine is
busy with. ``--pin`` leaves the last core to the pickers and the others to everything else: what is then seen of a picker
is its own, not what the scheduler makes of more busy processes than cores. Needs ``wrk`` and the ``test`` extra.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent / "support"))

from envoy_proxy import EnvoySettings, bootstrap
from epp_scene import (
    MODEL,
    TOKENIZER,
    Load,
    Paced,
    backend,
    bodies,
    cpu_s,
    envoy,
    family,
    load,
    paced,
    publish,
    started,
    told,
    without_picker,
)
from kv_publisher import ScriptedEngine

PICKERS = Path(__file__).with_name("epp_pickers.py")
NONE = "none"
CONSTANT = "constant"
TIMED = "timed"


@dataclass(frozen=True)
class Front:
    """An Envoy and the picker that it asks."""

    address: str
    envoy_pid: int
    picker: subprocess.Popen[bytes] | None

    def used_s(self) -> tuple[float, float]:
        """CPU seconds of Envoy and of the picker so far."""
        picker = cpu_s(family(self.picker.pid)) if self.picker is not None else 0.0
        return cpu_s({self.envoy_pid}), picker


@dataclass(frozen=True)
class Scene:
    fronts: Mapping[str, Front]
    backends_pid: int
    files: Mapping[int, Path]
    """Bodies by size."""


def spread(values: Sequence[float], share: float) -> float:
    """A percentile in milliseconds."""
    return sorted(values)[int(len(values) * share)] * 1e3


def compare_rates(scene: Scene, size: int, args: argparse.Namespace) -> float:
    """Print what ``wrk`` gets through each; returns requests per second of our first."""
    names = [name for name in scene.fronts if name not in (NONE, TIMED)]
    rows: dict[str, list[tuple[Load, float, float]]] = {name: [] for name in names}
    for number in range(args.rounds + 1):
        for name in names:
            print(f"{size} {name} {number}", end="\r", file=sys.stderr)
            front = scene.fronts[name]
            before = front.used_s()
            seconds = args.seconds if number else 1
            seen = load(f"http://{front.address}", scene.files[size], args.connections, seconds)
            spent = [
                (now - then) / seen.count * 1e6 for now, then in zip(front.used_s(), before, strict=True)
            ]
            if number:  # the first round warms up
                rows[name].append((seen, spent[0], spent[1]))
    rates, used = {}, {}
    for name, found in rows.items():
        rates[name] = statistics.median(seen.rate for seen, _, _ in found)
        used[name] = statistics.median(picker for _, _, picker in found)
        proxy = statistics.median(spent for _, spent, _ in found)
        p50 = statistics.median(seen.p50_ms for seen, _, _ in found)
        print(f"{size:>6} {name:>9} {rates[name]:>8.0f} {used[name]:>13.0f} {proxy:>12.0f} {p50:>7.2f}")
    ours = [name for name in names if name != CONSTANT]
    for name in ours:
        print(
            f"       {name} / constant: {rates[name] / rates[CONSTANT]:.2f} of its requests, "
            f"{used[name] / used[CONSTANT]:.2f} of its CPU time"
        )
    return rates[ours[0]]


def compare_latency(scene: Scene, size: int, rate: float, args: argparse.Namespace) -> None:
    """Print what each picker adds at so many requests per second; rounds alternate."""
    rows: dict[str, list[tuple[Paced, list[float]]]] = {name: [] for name in (NONE, CONSTANT, TIMED)}
    inner: dict[str, list[float]] = {"wall_s": [], "cpu_s": [], "pauses_s": []}
    inner_of(scene.fronts[TIMED])
    for _ in range(args.rounds):
        for name, found in rows.items():
            print(f"paced {name}        ", end="\r", file=sys.stderr)
            front = scene.fronts[name]
            before = (*front.used_s(), cpu_s({scene.backends_pid}))
            seen = paced(front.address, scene.files[size], rate, args.seconds)
            after = (*front.used_s(), cpu_s({scene.backends_pid}))
            spent = [now - then for now, then in zip(after, before, strict=True)]
            found.append((seen, [one / args.seconds * 100 for one in (*spent, seen.client_cpu_s)]))
            if name == TIMED:
                for key, values in inner_of(front).items():
                    inner[key] += values
    print(
        f"       at {rate:.0f} req/s       p50 ms  p99 ms   adds p50  adds p99   CPU: Envoy picker workers client"
    )
    for name, found in rows.items():
        p50, p99 = (statistics.median(seen[column] for seen, _ in found) for column in (0, 1))
        adds = [
            statistics.median(one[0][column] - none[0][column] for one, none in zip(found, rows[NONE], strict=True))
            for column in (0, 1)
        ]  # fmt: skip
        used = [statistics.median(one[1][column] for one in found) for column in range(4)]
        shares = " ".join(f"{share:>6.0f}%" for share in used)
        label = {TIMED: "ours", NONE: "no picker"}.get(name, name)
        print(f"       {label:>16} {p50:>9.2f} {p99:>7.2f} {adds[0]:>10.2f} {adds[1]:>9.2f}       {shares}")
    for key, label in (("wall_s", "by the clock"), ("cpu_s", "CPU time")):
        shown = ", ".join(f"p{share:g} {spread(inner[key], share / 100):.2f}" for share in (50, 99, 99.9))
        print(f"       inside ours, request whole to endpoint written, {label}: {shown} ms")
    pauses = inner["pauses_s"]
    print(
        f"       pauses of its collector: {len(pauses)}, the longest {max(pauses, default=0.0) * 1e3:.1f} ms"
    )


def inner_of(front: Front) -> dict[str, list[float]]:
    """What the timed picker saw of itself since it was last asked."""
    assert front.picker is not None
    assert front.picker.stdout is not None
    front.picker.send_signal(signal.SIGUSR1)
    seen: dict[str, list[float]] = json.loads(front.picker.stdout.readline())
    return seen


def configuration(workers: Sequence[str], engines: Sequence[ScriptedEngine]) -> dict[str, Any]:
    return {
        "epp": {"host": "127.0.0.1", "grpc_port": 0, "health_port": 0, "http_port": 0},
        "tokens": {"local": [{"model": MODEL, "path": str(TOKENIZER)}], "probe": False},
        "fleet": {
            "workers": [
                {"url": f"http://{worker}", "events": engine.events, "replay": engine.replay}
                for worker, engine in zip(workers, engines, strict=True)
            ]
        },
    }


def commands(args: argparse.Namespace, worker: str, file: Path) -> dict[str, list[str]]:
    """How each picker is started."""
    found = {CONSTANT: [sys.executable, str(PICKERS), "constant", worker]}
    for count in args.processes:
        command = [sys.executable, "-P", "-m", "router", "epp", "-c", str(file), "--processes", str(count)]
        found["ours" if count == 1 else f"ours x{count}"] = command
    if args.latency:
        found[TIMED] = [sys.executable, str(PICKERS), "timed", str(file)]
    on_core = ["taskset", "-c", str(max(args.cores))] if args.pin else []
    return {name: on_core + command for name, command in found.items()}


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
    settings = EnvoySettings(response_mode=response)
    threads = max(args.processes)
    async with contextlib.AsyncExitStack() as stack:
        behind = await stack.enter_async_context(envoy(backends, home, "backends"))
        workers = list(behind.addresses.values())
        (home / "pointsman.yaml").write_text(json.dumps(configuration(workers, engines)))
        fronts = {}
        for name, command in commands(args, workers[0], home / "pointsman.yaml").items():
            picker = stack.enter_context(started(command, home))
            config = bootstrap(told(picker)["grpc"], workers, settings)
            front = await stack.enter_async_context(envoy(config, home, f"front-{len(fronts)}", threads))
            fronts[name] = Front(front.addresses["front"], front.pid, picker)
        if args.latency:
            config = without_picker(bootstrap("127.0.0.1:1", workers, settings))
            front = await stack.enter_async_context(envoy(config, home, "front-none", threads))
            fronts[NONE] = Front(front.addresses["front"], front.pid, None)
        for number, engine in enumerate(engines):
            await asyncio.to_thread(engine.wait_for_subscriber)
            for prompts in held.values():
                publish(engine, prompts[number::2])
        scene = Scene(fronts, behind.pid, files)
        load_1m, pinned = os.getloadavg()[0], ", the last one for the picker" if args.pin else ""
        print(
            f"load {load_1m:.1f} on {len(args.cores)} cores{pinned}; Envoy with {threads} threads; medians of {args.rounds}"
        )
        print(
            f"{'bytes':>6} {'picker':>9} {'req/s':>8} {'picker us/req':>13} {'Envoy us/req':>12} {'p50 ms':>7}"
        )
        for size in args.sizes:
            rate = await asyncio.to_thread(compare_rates, scene, size, args)
            if args.latency:
                await asyncio.to_thread(compare_latency, scene, size, args.rate or rate / 2, args)
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
    parser.add_argument("--processes", type=int, nargs="+", default=[1], help="processes of our picker")
    parser.add_argument("--latency", action="store_true", help="what a picker adds at half of our rate, too")
    parser.add_argument("--rate", type=float, help="at this rate instead")
    parser.add_argument("--pin", action="store_true", help="pickers have a core of their own")
    parser.add_argument("--text", action="store_true", help="prompts as text, tokenised by the picker")
    args = parser.parse_args()
    if shutil.which("wrk") is None:
        raise SystemExit("wrk is not installed")
    args.cores = os.sched_getaffinity(0)
    if args.pin:
        if max(args.processes) > 1 or len(args.cores) < 2:
            parser.error("--pin needs two cores, and is for one process")
        os.sched_setaffinity(0, args.cores - {max(args.cores)})
    with tempfile.TemporaryDirectory(prefix="pointsman-epp-") as home:
        asyncio.run(measure(args, Path(home)))


if __name__ == "__main__":
    main()
