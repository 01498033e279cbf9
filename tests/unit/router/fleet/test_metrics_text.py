# SPDX-License-Identifier: Apache-2.0
import time

from router.fleet.metrics_text import MAX_METRICS_BYTES, WorkerMetrics, parse_worker_metrics

PAGE = b"""# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="a{b}\\",c"} 3.0
vllm:num_requests_running{engine="1",model_name="a"} 2.0
vllm:num_requests_waiting{engine="0",model_name="a"} 1.0
vllm:num_requests_waiting_by_reason{engine="0",reason="capacity"} 50.0
vllm:kv_cache_usage_perc{engine="0",model_name="a"} 0.5
vllm:kv_cache_usage_perc{engine="1",model_name="a"} 0.25
vllm:cache_config_info{block_size="32",cache_dtype="auto",engine="0",hash_block_size="None",mamba_block_size="64",num_gpu_blocks="40"} 1.0
vllm:engine_sleep_state{engine="0",model_name="a",sleep_state="awake"} 1.0
vllm:engine_sleep_state{engine="0",model_name="a",sleep_state="discard_all"} 0.0
process_start_time_seconds 1.78e+09
"""


def test_gauges_are_summed_over_engines_and_usage_is_their_mean():
    assert parse_worker_metrics(PAGE) == WorkerMetrics(5, 1, 0.375, 32, "auto", 39, 1.78e9, False)


def test_older_spelling_of_the_cache_usage_is_read():
    assert parse_worker_metrics(b'vllm:gpu_cache_usage_perc{model_name="a"} 0.75\n').kv_cache_usage == 0.75


def test_a_sleeping_engine_shows():
    page = PAGE.replace(b'sleep_state="awake"} 1.0', b'sleep_state="awake"} 0.0')
    assert parse_worker_metrics(page).asleep is True


def test_a_page_without_our_gauges_says_nothing():
    assert parse_worker_metrics(b"") == WorkerMetrics()
    assert parse_worker_metrics(b"<html>nothing</html>\n") == WorkerMetrics()


def test_values_that_are_no_numbers_are_left_out():
    page = b"vllm:num_requests_running NaN\nvllm:num_requests_waiting +Inf\nvllm:kv_cache_usage_perc x\n"
    assert parse_worker_metrics(page) == WorkerMetrics()


def test_absurd_values_stay_in_range():
    page = b"vllm:num_requests_running -3\nvllm:kv_cache_usage_perc 7\n"
    metrics = parse_worker_metrics(page)
    assert (metrics.running, metrics.kv_cache_usage) == (0, 1.0)


def test_a_cut_last_line_does_not_count():
    assert parse_worker_metrics(b"vllm:num_requests_running 1\nvllm:num_requests_waiting 12").waiting is None


def test_a_huge_page_is_read_to_the_limit_in_little_time():
    started_s = time.perf_counter()
    page = PAGE + b'other{x="y"} 1\n' * 700_000
    metrics = parse_worker_metrics(page + b"vllm:num_requests_running 100\n")
    assert len(page) > MAX_METRICS_BYTES
    assert metrics.running == 5
    assert time.perf_counter() - started_s < 5
