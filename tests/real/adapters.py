# SPDX-License-Identifier: Apache-2.0
"""Small adapters for the small model, written without torch, and their way in and out of an engine."""

from __future__ import annotations

import json
import random
import struct
from pathlib import Path
from typing import Any

from .engine import RealWorker

RANK = 8
ARGUMENTS = ("--enable-lora", "--max-lora-rank", str(RANK), "--max-loras", "2")
"""Of an engine that takes them."""


def write_adapter(folder: Path, model_dir: Path, seed: int) -> None:
    """Random weights for queries, keys and values of every layer, large enough to change the text."""
    folder.mkdir(parents=True, exist_ok=True)
    config = json.loads((model_dir / "config.json").read_text())
    heads = {
        "q_proj": config["num_attention_heads"],
        "k_proj": config["num_key_value_heads"],
        "v_proj": config["num_key_value_heads"],
    }
    chance = random.Random(seed)
    tensors = {}
    for layer in range(config["num_hidden_layers"]):
        for name, count in heads.items():
            place = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            tensors[f"{place}.lora_A.weight"] = (RANK, config["hidden_size"])
            tensors[f"{place}.lora_B.weight"] = (count * config["head_dim"], RANK)
    (folder / "adapter_model.safetensors").write_bytes(_safetensors(tensors, chance))
    described: dict[str, Any] = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": RANK,
        "lora_alpha": RANK,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": list(heads),
    }
    (folder / "adapter_config.json").write_text(json.dumps(described))


def _safetensors(shapes: dict[str, tuple[int, int]], chance: random.Random) -> bytes:
    """The file format of that name: length of a JSON header, the header, the numbers (here float32)."""
    header, numbers = {}, b""
    for name, (rows, columns) in shapes.items():
        values = [chance.gauss(0, 0.3) for _ in range(rows * columns)]
        start, numbers = len(numbers), numbers + struct.pack(f"<{len(values)}f", *values)
        header[name] = {"dtype": "F32", "shape": [rows, columns], "data_offsets": [start, len(numbers)]}
    described = json.dumps(header).encode()
    described += b" " * (-len(described) % 8)
    return struct.pack("<Q", len(described)) + described + numbers


def load_adapter(worker: RealWorker, name: str, folder: Path, *, in_place: bool = False) -> None:
    worker.command(
        "/v1/load_lora_adapter", {"lora_name": name, "lora_path": str(folder), "load_inplace": in_place}
    )


def unload_adapter(worker: RealWorker, name: str) -> None:
    worker.command("/v1/unload_lora_adapter", {"lora_name": name})
