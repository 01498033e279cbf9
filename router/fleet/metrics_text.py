# SPDX-License-Identifier: Apache-2.0
"""The few gauges routing needs, out of a worker's Prometheus text.

A vLLM page is some 100 kB of histograms, polled every second from every worker, so lines are found by
name with one compiled expression instead of being parsed one by one: O(bytes), no object per line
that is not wanted. Names are those of ``vllm/v1/metrics/loggers.py`` (0.9 to 0.33);
``vllm:gpu_cache_usage_perc`` is the older spelling of ``vllm:kv_cache_usage_perc``.

Values of several engines (data-parallel ranks) are summed; the cache usage is their mean. Pure.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

MAX_METRICS_BYTES = 2 * 2**20
"""More of a page is not looked at; a worker can neither fill our memory nor hold a poll."""

_WANTED = (
    rb"vllm:num_requests_running",
    rb"vllm:num_requests_waiting",
    rb"vllm:kv_cache_usage_perc",
    rb"vllm:gpu_cache_usage_perc",
    rb"vllm:cache_config_info",
    rb"vllm:engine_sleep_state",
    rb"vllm:kv_offload_load_bytes_total",
    rb"vllm:external_prefix_cache_hits_total",
    rb"process_start_time_seconds",
)
# A sample is: name, optional {labels}, value, optional timestamp. Label values may hold any escaped
# character, so the labels end at the last brace of the line.
_SAMPLE = re.compile(
    rb"^(?P<name>" + rb"|".join(_WANTED) + rb")(?:\{(?P<labels>[^\n]*)\})?[ \t]+(?P<value>[^ \t\r\n]+)",
    re.MULTILINE,
)
_BLOCK_SIZE = re.compile(rb'(?:^|,)\s*block_size="(\d{1,7})"')
_GPU_BLOCKS = re.compile(rb'(?:^|,)\s*num_gpu_blocks="(\d{1,12})"')
_CACHE_DTYPE = re.compile(rb'(?:^|,)\s*cache_dtype="([\w.]{1,40})"')
_FEWEST_LOADED_TOKENS = 4096
_AWAKE = re.compile(rb'(?:^|,)\s*sleep_state="awake"')


@dataclass(frozen=True, slots=True)
class WorkerMetrics:
    """What a page says; None where it is silent."""

    running: int | None = None
    waiting: int | None = None
    kv_cache_usage: float | None = None
    block_size_tokens: int | None = None
    cache_dtype: str | None = None
    hbm_blocks: int | None = None
    """Of one rank, without the one that vLLM never uses."""
    process_start_time_s: float | None = None
    asleep: bool | None = None
    kv_bytes_per_token: float | None = None
    """Loaded from below HBM, of all ranks together."""


def parse_worker_metrics(text: bytes) -> WorkerMetrics:
    """Read a page of at most :data:`MAX_METRICS_BYTES`; the rest of a longer one is not looked at.

    A last line that was cut off is ignored, and so is every value that is no finite number.
    """
    text = text[:MAX_METRICS_BYTES]
    text = text[: text.rfind(b"\n") + 1]
    sums: dict[bytes, float] = {}
    counts: dict[bytes, int] = {}
    block_size_tokens: int | None = None
    cache_dtype: str | None = None
    hbm_blocks: int | None = None
    asleep: bool | None = None
    for sample in _SAMPLE.finditer(text):
        value = _number(sample["value"])
        if value is None:
            continue
        name, labels = sample["name"], sample["labels"] or b""
        if name == b"vllm:cache_config_info":
            found = _BLOCK_SIZE.search(labels)
            block_size_tokens = int(found[1]) if found else block_size_tokens
            dtype = _CACHE_DTYPE.search(labels)
            cache_dtype = dtype[1].decode() if dtype else cache_dtype
            blocks = _GPU_BLOCKS.search(labels)
            hbm_blocks = int(blocks[1]) - 1 if blocks else hbm_blocks
        elif name == b"vllm:engine_sleep_state":
            if _AWAKE.search(labels):
                asleep = bool(asleep) or value == 0
        else:
            sums[name] = sums.get(name, 0.0) + value
            counts[name] = counts.get(name, 0) + 1
    usage = b"vllm:kv_cache_usage_perc"
    if usage not in sums:
        usage = b"vllm:gpu_cache_usage_perc"
    return WorkerMetrics(
        running=_count(sums.get(b"vllm:num_requests_running")),
        waiting=_count(sums.get(b"vllm:num_requests_waiting")),
        kv_cache_usage=min(1.0, max(0.0, sums[usage] / counts[usage])) if usage in sums else None,
        block_size_tokens=block_size_tokens or None,
        cache_dtype=cache_dtype,
        hbm_blocks=hbm_blocks if hbm_blocks and hbm_blocks > 0 else None,
        process_start_time_s=_mean(sums, counts, b"process_start_time_seconds"),
        asleep=asleep,
        kv_bytes_per_token=_kv_bytes_per_token(sums),
    )


def _kv_bytes_per_token(sums: dict[bytes, float]) -> float | None:
    """Hits count when a request is admitted and bytes when they have arrived, so few of them say little."""
    tokens = sums.get(b"vllm:external_prefix_cache_hits_total", 0.0)
    loaded_bytes = sums.get(b"vllm:kv_offload_load_bytes_total", 0.0)
    return loaded_bytes / tokens if tokens >= _FEWEST_LOADED_TOKENS and loaded_bytes > 0 else None


def _number(text: bytes) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) else None


def _count(value: float | None) -> int | None:
    return None if value is None else max(0, round(value))


def _mean(sums: dict[bytes, float], counts: dict[bytes, int], name: bytes) -> float | None:
    return sums[name] / counts[name] if name in sums else None
