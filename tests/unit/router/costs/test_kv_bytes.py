# SPDX-License-Identifier: Apache-2.0
"""KV bytes per token against figures that were published for the same models."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from router.costs.kv_bytes import kv_bytes_per_token, with_model
from router.costs.profile import load_profile
from router.errors import ConfigError

LLAMA_8B = {
    "model_type": "llama",
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "hidden_size": 4096,
    "torch_dtype": "bfloat16",
}
QWEN3_32B = {
    "num_hidden_layers": 64,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "hidden_size": 5120,
    "head_dim": 128,
    "use_sliding_window": False,
    "sliding_window": None,
    "torch_dtype": "bfloat16",
}
DEEPSEEK_V3 = {
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "hidden_size": 7168,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "num_nextn_predict_layers": 1,
    "torch_dtype": "bfloat16",
    "quantization_config": {"quant_method": "fp8", "fmt": "e4m3"},
}
GPT_OSS_120B = {
    "num_hidden_layers": 36,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "hidden_size": 2880,
    "head_dim": 64,
    "sliding_window": 128,
    "layer_types": ["sliding_attention", "full_attention"] * 18,
    "quantization_config": {"quant_method": "mxfp4"},
}
GLM_4_5 = {
    "num_hidden_layers": 92,
    "num_attention_heads": 96,
    "num_key_value_heads": 8,
    "hidden_size": 5120,
    "head_dim": 128,
    "num_nextn_predict_layers": 1,
    "dtype": "bfloat16",
}
CHATGLM = {
    "num_layers": 40,
    "num_attention_heads": 32,
    "multi_query_attention": True,
    "multi_query_group_num": 2,
    "kv_channels": 128,
    "hidden_size": 4096,
    "torch_dtype": "bfloat16",
}
GLM_5_2 = {
    "num_hidden_layers": 78,
    "num_attention_heads": 64,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "index_topk": 2048,
    "index_head_dim": 128,
    "index_topk_freq": 4,
    "dtype": "bfloat16",
}
HYBRID = {
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "hidden_size": 2048,
    "head_dim": 256,
    "torch_dtype": "bfloat16",
}
A_LAYER = 2 * 2 * 256 * 2
"""Bytes of one full-attention layer of ``HYBRID``."""


@pytest.mark.parametrize(
    ("config", "kv_dtype", "expected"),
    [
        # 128 KiB: Llama 3 8B in S. Raschka's architecture gallery, and vLLM's own capacity figures.
        (LLAMA_8B, None, 131_072),
        (LLAMA_8B, "auto", 131_072),
        (LLAMA_8B, "fp8", 65_536),
        (QWEN3_32B, None, 262_144),
        (QWEN3_32B, "fp8_e4m3", 131_072),
        # 68.6 KiB in the same gallery: 61 layers of one 576-wide vector; the draft layer is not counted.
        (DEEPSEEK_V3, None, 70_272),
        (DEEPSEEK_V3, "fp8", 35_136),
        (DEEPSEEK_V3, "fp8_ds_mla", 61 * 656),
        # 18 layers of 8 heads of 64: those with a window of 128 tokens do not grow.
        (GPT_OSS_120B, None, 36_864),
        (GLM_4_5, None, 376_832),
        (CHATGLM, None, 40_960),
    ],
)
def test_published_models_have_the_published_size(
    config: dict[str, Any], kv_dtype: str | None, expected: float
) -> None:
    assert kv_bytes_per_token(config, kv_dtype) == expected


def test_glm_5_2_has_the_size_that_its_measurements_name() -> None:
    # "about 93 KB" (llm-d, glm-5.2-h200.md): 78 latents, and an index for the first and then every fourth layer.
    assert kv_bytes_per_token(GLM_5_2) == 78 * 1152 + 21 * 132
    assert kv_bytes_per_token(GLM_5_2) == pytest.approx(
        load_profile("glm-5.2-h200").kv_bytes_per_token, rel=0.01
    )


@pytest.mark.parametrize("name", ["llama-3.1-8b-h100", "qwen3-32b-h100"])
def test_profiles_have_the_size_of_their_models(name: str) -> None:
    config = {"llama-3.1-8b-h100": LLAMA_8B, "qwen3-32b-h100": QWEN3_32B}[name]
    assert kv_bytes_per_token(config) == load_profile(name).kv_bytes_per_token


@pytest.mark.parametrize(
    ("layers", "how", "full"),
    [
        (48, {"full_attention_interval": 4}, 12),  # Qwen3-Next
        (4, {"layer_types": ["linear_attention"] * 3 + ["full_attention"]}, 1),
        (4, {"layer_types": ["chunked_attention"] * 3 + ["full_attention"]}, 1),  # Llama 4
        (2, {"layer_types": ["deepseek_sparse_attention", "conv"]}, 1),
        (4, {"layers_block_type": ["mamba", "attention", "mamba", "hybrid"]}, 2),  # Bamba, Zamba 2
        (8, {"hybrid_override_pattern": "M-M*-M*-"}, 2),  # Nemotron-H
        (8, {"attn_type_list": [0, 0, 0, 1, 0, 0, 0, 1]}, 2),  # MiniMax-01
        (4, {"linear_attn_config": {"full_attn_layers": [4], "kda_layers": [1, 2, 3]}}, 1),  # Kimi Linear
        (32, {"attn_layer_period": 8, "attn_layer_offset": 4}, 4),  # Jamba
        (26, {"model_type": "gemma2", "sliding_window": 4096}, 13),
        (48, {"model_type": "gemma3_text", "sliding_window": 1024}, 8),
        (48, {"sliding_window_pattern": 6, "sliding_window": 1024}, 8),
        (28, {"use_sliding_window": False, "sliding_window": 32768, "max_window_layers": 21}, 28),  # Qwen 2
        (28, {"use_sliding_window": True, "sliding_window": 32768, "max_window_layers": 21}, 21),
        (30, {"layer_types": ["full_attention"] * 30, "num_kv_shared_layers": 10}, 20),  # Gemma 3n
    ],
)
def test_only_layers_that_keep_every_token_count(layers: int, how: dict[str, Any], full: int) -> None:
    assert kv_bytes_per_token(HYBRID | {"num_hidden_layers": layers} | how) == full * A_LAYER


@pytest.mark.parametrize("name", ["text_config", "llm_config", "language_config"])
def test_the_language_model_of_a_larger_one_is_found(name: str) -> None:
    inner = {key: value for key, value in LLAMA_8B.items() if key != "torch_dtype"}
    outer = {"torch_dtype": "float16", "vision_config": {"num_hidden_layers": 27}, name: inner}
    assert kv_bytes_per_token(outer) == 131_072


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"torch_dtype": "float32"}, 131_072),  # vLLM runs it in 16 bits
        ({"torch_dtype": None}, 131_072),
        ({"torch_dtype": "torch.float16"}, 131_072),
        ({"quantization_config": {"kv_cache_scheme": {"num_bits": 8, "type": "float"}}}, 65_536),
        ({"quantization_config": {"quant_method": "modelopt", "kv_cache_quant_algo": "FP8"}}, 65_536),
        ({"num_key_value_heads": None}, 4 * 131_072),  # every head its own
        ({"head_dim": 64}, 65_536),
        ({"v_head_dim": 64}, 98_304),  # keys wider than values
        ({"multi_query": True, "num_key_value_heads": None}, 131_072 / 8),
    ],
)
def test_fields_mean_what_the_engine_takes_them_for(changes: dict[str, Any], expected: float) -> None:
    assert kv_bytes_per_token(LLAMA_8B | changes) == expected


@pytest.mark.parametrize(
    ("changes", "kv_dtype", "field"),
    [
        ({"num_hidden_layers": None}, None, "num_hidden_layers"),
        ({"num_hidden_layers": "32"}, None, "num_hidden_layers"),
        ({"num_attention_heads": 0}, None, "num_attention_heads"),
        ({"hidden_size": None}, None, "hidden_size"),
        ({"num_attention_heads": 33}, None, "head_dim"),
        ({"num_key_value_heads": True}, None, "num_key_value_heads"),
        ({"torch_dtype": "bfloat17"}, None, "torch_dtype"),
        ({}, "fp7", "kv_dtype"),
        ({}, "fp8_ds_mla", "kv_dtype"),
        ({"layer_types": ["full_attention"]}, None, "layer_types"),
        ({"sliding_window": 4096}, None, "sliding_window"),  # Mistral 7B v0.1: no layer keeps everything
        ({"compress_ratios": [4, 128]}, None, "compress_ratios"),
    ],
)
def test_what_is_not_understood_is_named(changes: dict[str, Any], kv_dtype: str | None, field: str) -> None:
    with pytest.raises(ConfigError) as caught:
        kv_bytes_per_token(LLAMA_8B | changes, kv_dtype)
    assert caught.value.field == field


def test_profile_takes_the_size_from_a_directory_or_a_file(tmp_path: Path) -> None:
    profile = load_profile("default")
    file = tmp_path / "config.json"
    file.write_text(json.dumps(DEEPSEEK_V3))
    for path in (tmp_path, file):
        assert with_model(profile, str(path), None, "--model").kv_bytes_per_token == 70_272
    assert with_model(profile, str(file), "fp8", "--model").kv_bytes_per_token == 35_136
    assert with_model(profile, str(file), None, "--model").prefill_s_per_token == profile.prefill_s_per_token


@pytest.mark.parametrize("content", [None, "{", "[1]", '{"num_hidden_layers": 0}'])
def test_a_model_that_cannot_be_read_is_bad_configuration(content: str | None, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(ConfigError) as caught:
        with_model(load_profile("default"), str(tmp_path), None, "costs.model_config")
    assert caught.value.field.startswith("costs.model_config")
    if content == '{"num_hidden_layers": 0}':
        assert "num_attention_heads" in caught.value.field or "num_hidden_layers" in caught.value.field
