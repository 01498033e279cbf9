# SPDX-License-Identifier: Apache-2.0
"""/metrics of a simulated worker: the names and labels of vLLM 0.32, in Prometheus' text format."""

from __future__ import annotations

from collections.abc import Iterator

from engine_ext.sim.config import SimConfig
from engine_ext.sim.output import SimMetrics

_Sample = tuple[dict[str, str], float]


def render_metrics(metrics: SimMetrics, config: SimConfig, model: str, started_at_s: float) -> str:
    """The page; ``started_at_s`` is the Unix time at which this process, real or restarted, began."""
    labels = {"engine": "0", "model_name": model}
    lines: list[str] = []
    for name, kind, samples in _families(metrics, config, started_at_s):
        lines.append(f"# TYPE {name} {kind}")
        own = {} if name.startswith("process_") else labels
        lines.extend(_line(name, {**own, **extra}, value) for extra, value in samples)
    return "\n".join(lines) + "\n"


def _families(
    metrics: SimMetrics, config: SimConfig, started_at_s: float
) -> Iterator[tuple[str, str, list[_Sample]]]:
    counters = metrics.counters
    info = {
        "block_size": str(config.block_size_tokens),
        "num_gpu_blocks": str(config.hbm_blocks),
        "enable_prefix_caching": "True",
    }
    for name, value in (
        ("vllm:num_requests_running", metrics.running),
        ("vllm:num_requests_waiting", metrics.waiting),
        ("vllm:kv_cache_usage_perc", metrics.kv_cache_usage),
    ):
        yield name, "gauge", [({}, value)]
    yield "vllm:cache_config_info", "gauge", [(info, 1)]
    states = ("awake", "weights_offloaded", "discard_all")
    now = "weights_offloaded" if metrics.asleep else "awake"
    yield "vllm:engine_sleep_state", "gauge", [({"sleep_state": s}, float(s == now)) for s in states]
    for name, value in (
        ("vllm:prefix_cache_queries_total", counters.prefix_cache_queries),
        ("vllm:prefix_cache_hits_total", counters.prefix_cache_hits),
        ("vllm:external_prefix_cache_queries_total", counters.external_queries),
        ("vllm:external_prefix_cache_hits_total", counters.external_hits),
        ("vllm:prompt_tokens_total", counters.prompt_tokens),
        ("vllm:generation_tokens_total", counters.generation_tokens),
        ("vllm:num_preemptions_total", counters.preemptions),
    ):
        yield name, "counter", [({}, value)]
    by_source: list[_Sample] = [({"source": s}, n) for s, n in metrics.cached_by_source.items()]
    yield "vllm:prompt_tokens_cached_by_source_total", "counter", by_source
    yield "process_start_time_seconds", "gauge", [({}, started_at_s)]


def _line(name: str, labels: dict[str, str], value: float) -> str:
    text = ",".join(f'{key}="{_escape(label)}"' for key, label in labels.items())
    return f"{name}{{{text}}} {float(value)!r}" if text else f"{name} {float(value)!r}"


def _escape(label: str) -> str:
    return label.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
