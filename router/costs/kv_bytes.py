# SPDX-License-Identifier: Apache-2.0
"""KV bytes per token from a model's Hugging Face ``config.json``. Pure.

    grouped-query attention   layers x KV heads x (key + value dimensions) x bytes of an element
    MLA                       layers x (latent + rotary dimensions) x bytes: one vector, shared by all heads
    sparse attention's index  one 8-bit key with a 4-byte scale per 128 dimensions, in layers with an indexer

``layers`` are those that keep every token (``router.costs.attention_layers``). Of one copy of the model: engines that
repeat KV heads or latents over tensor-parallel ranks hold more. Draft layers (MTP) are not counted.

Sizes as vLLM 0.32 lays them out: ``v1/kv_cache_interface.py``; ``models/deepseek_v2.py`` for MLA and its indexer;
``v1/attention/backends/mla/flashmla_sparse.py`` for ``fp8_ds_mla``; ``utils/torch_utils.py`` for ``auto``.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from router.costs.attention_layers import full_attention_layers
from router.costs.model_config import dtype_name, integer, layer_count, load_model_config, text_config
from router.costs.profile import CostProfile
from router.errors import ConfigError

_ELEMENT_BYTES = {
    "float32": 4.0,
    "float": 4.0,
    "float16": 2.0,
    "half": 2.0,
    "bfloat16": 2.0,
    "int8": 1.0,
    "fp8": 1.0,
    "fp8_e4m3": 1.0,
    "fp8_e5m2": 1.0,
    "fp8_inc": 1.0,
    "nvfp4": 0.5625,  # 4 bits, and an 8-bit scale for each 16
}
KV_DTYPES = ("auto", *_ELEMENT_BYTES, "fp8_ds_mla")
_DS_MLA_BYTES = 656  # 512 of the latent, four scales, 64 rotary dimensions in 16 bits
_INDEX_GROUP = 128


def kv_bytes_per_token(config: Mapping[str, object], kv_dtype: str | None = None) -> float:
    """Bytes that one token of a prompt adds to the cache; ``kv_dtype`` as vLLM's ``--kv-cache-dtype``.

    Raises:
        ConfigError: names the field of the file (or ``kv_dtype``) that is missing or not understood.
    """
    text = text_config(config)
    if text.get("compress_ratios") is not None:
        raise ConfigError(
            "compress_ratios", text["compress_ratios"], "a model that keeps one entry per token"
        )
    dtype = kv_dtype or "auto"
    if dtype not in KV_DTYPES:
        raise ConfigError("kv_dtype", kv_dtype, f"one of {', '.join(KV_DTYPES)}")
    if dtype == "auto":
        dtype = _auto(text)
    if text.get("kv_lora_rank") is not None:
        return full_attention_layers(text) * _latent_bytes(text, dtype) + _index_bytes(text)
    if dtype == "fp8_ds_mla":
        raise ConfigError("kv_dtype", kv_dtype, "fp8_ds_mla only with a model that has kv_lora_rank")
    heads = integer(text, "num_attention_heads", "n_head", "num_heads", "n_heads")
    head = _head_dimensions(text, heads)
    values = integer(text, "v_head_dim", default=0) or head
    return full_attention_layers(text) * _kv_heads(text, heads) * (head + values) * _ELEMENT_BYTES[dtype]


def with_model(profile: CostProfile, path: str, kv_dtype: str | None, field: str) -> CostProfile:
    """The profile with the KV bytes of the model at ``path``; errors begin with ``field``.

    Raises:
        ConfigError: the file cannot be read, or a field of it is not understood.
    """
    config = load_model_config(path, field)
    try:
        size = kv_bytes_per_token(config, kv_dtype)
    except ConfigError as error:
        raise ConfigError(f"{field} ({error.field})", error.value, error.accepted) from error
    return msgspec.structs.replace(profile, kv_bytes_per_token=size)


def _auto(text: Mapping[str, object]) -> str:
    """The checkpoint's own 8-bit cache, else its weights' type; vLLM runs 32-bit models in 16 bits."""
    quantisation = text.get("quantization_config")
    if isinstance(quantisation, Mapping):
        scheme = quantisation.get("kv_cache_scheme") or quantisation.get("kv_cache_quant_algo")
        if isinstance(scheme, Mapping) and scheme.get("num_bits") == 8:
            return "fp8"
        if isinstance(scheme, str) and scheme.lower() in _ELEMENT_BYTES:
            return scheme.lower()
    dtype = dtype_name(text)
    if dtype is None or dtype == "float32":
        return "bfloat16"
    if dtype not in _ELEMENT_BYTES:
        raise ConfigError("torch_dtype", dtype, f"one of {', '.join(_ELEMENT_BYTES)}")
    return dtype


def _latent_bytes(text: Mapping[str, object], dtype: str) -> float:
    """Of one token in one layer."""
    if dtype == "fp8_ds_mla":
        return _DS_MLA_BYTES
    dimensions = integer(text, "kv_lora_rank") + integer(text, "qk_rope_head_dim", default=0)
    return dimensions * _ELEMENT_BYTES[dtype]


def _index_bytes(text: Mapping[str, object]) -> int:
    """Of one token in all layers; layers that use the index of another have none (``index_topk_freq``)."""
    if text.get("index_topk") is None:
        return 0
    dimensions = integer(text, "index_head_dim")
    every = integer(text, "index_topk_freq", default=1) or 1
    offset = integer(text, "index_skip_topk_offset", default=2)
    pattern = text.get("index_topk_pattern")
    if isinstance(pattern, (str, list)):
        layers: int = sum(kind != "S" for kind in pattern)
    else:
        layers = sum(max(i - offset + 1, 0) % every == 0 for i in range(layer_count(text)))
    return layers * (dimensions + dimensions // _INDEX_GROUP * 4)


def _kv_heads(text: Mapping[str, object], heads: int) -> int:
    if text.get("multi_query") is True and text.get("new_decoder_architecture") is not True:
        return 1  # Falcon 7B, StarCoder
    names = (
        "n_head_kv",
        "num_kv_heads",
        "num_key_value_heads",
        "multi_query_group_num",
        "num_attention_groups",
    )
    return integer(text, *names, default=heads) or heads


def _head_dimensions(text: Mapping[str, object], heads: int) -> int:
    given = integer(text, "head_dim", "kv_channels", "hidden_size_per_head", default=0)
    if given:
        return given
    hidden = integer(text, "hidden_size", "n_embd", "d_model")
    if hidden % heads:
        raise ConfigError(
            "head_dim", None, f"a whole number, as hidden_size {hidden} has no {heads} equal parts"
        )
    return hidden // heads
