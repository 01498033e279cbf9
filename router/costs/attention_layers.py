# SPDX-License-Identifier: Apache-2.0
"""Which layers of a model keep every token, from its Hugging Face ``config.json``. Pure.

Only those grow with the prompt. A layer with a sliding window or chunked attention keeps a bounded number of tokens,
one with linear attention, a convolution or a state-space model keeps a state of fixed size.

How models say it (Transformers' configurations; vLLM ``config/model.py``, ``get_num_layers_by_block_type``):

    layer_types, layers_block_type    a name per layer
    hybrid_override_pattern           Nemotron-H: a letter per layer, ``*`` is attention
    attn_type_list                    MiniMax: 1 is full attention
    linear_attn_config                Kimi Linear: ``full_attn_layers``
    full_attention_interval           Qwen3-Next: every n-th
    attn_layer_period, _offset        Jamba: every n-th from an offset
    sliding_window_pattern            Gemma 3, Cohere 2: every n-th is full
    use_sliding_window                Qwen 2 and 3: False, or windows from layer ``max_window_layers`` on
    sliding_window alone              every layer has a window
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from router.costs.model_config import integer, layer_count
from router.errors import ConfigError

_FULL = {
    "full_attention",
    "attention",
    "hybrid",  # Zamba 2: a state-space layer with attention beside it
    "global",
    "global_attention",
    "indexed_attention",
    "deepseek_sparse_attention",
    "qwen_sparse_attention",
}
"""Sparse attention reads some tokens, but keeps all."""
_PATTERN_OF_TYPE = {"gemma2": 2, "gemma3": 6, "gemma3_text": 6, "cohere2": 4}
"""Every n-th layer is full where an older file leaves the pattern to the code."""


def full_attention_layers(config: Mapping[str, object]) -> int:
    """Number of layers that keep every token; ``config`` is that of the text model.

    Raises:
        ConfigError: names the field that is missing or not understood.
    """
    layers = layer_count(config)
    # Gemma 3n: the last layers use the cache of earlier ones.
    own = layers - integer(config, "num_kv_shared_layers", default=0)
    kept = sum(_keeps_all(config, layers)[: max(own, 0)])
    if not kept:
        accepted = "a model with full-attention layers (only their blocks are followed)"
        raise ConfigError("sliding_window", config.get("sliding_window"), accepted)
    return kept


def _keeps_all(config: Mapping[str, object], layers: int) -> list[bool]:
    """Per layer."""
    for name in ("layer_types", "layers_block_type"):
        if config.get(name) is not None:
            return [kind in _FULL for kind in _sequence(config, name, layers)]
    if config.get("hybrid_override_pattern") is not None:
        return [kind == "*" for kind in _sequence(config, "hybrid_override_pattern", layers)]
    if config.get("attn_type_list") is not None:
        return [kind == 1 for kind in _sequence(config, "attn_type_list", layers)]
    linear = config.get("linear_attn_config")
    if isinstance(linear, Mapping) and linear.get("full_attn_layers") is not None:
        full = _sequence(linear, "full_attn_layers")
        return [i + 1 in full for i in range(layers)]  # counted from 1
    if config.get("full_attention_interval") is not None:
        interval = integer(config, "full_attention_interval")
        return [(i + 1) % interval == 0 for i in range(layers)]
    if config.get("attn_layer_period") is not None:
        period = integer(config, "attn_layer_period")
        offset = integer(config, "attn_layer_offset", default=0)
        return [i % period == offset for i in range(layers)]
    return _without_windows(config, layers)


def _without_windows(config: Mapping[str, object], layers: int) -> list[bool]:
    pattern = _PATTERN_OF_TYPE.get(str(config.get("model_type")))
    for name in ("sliding_window_pattern", "_sliding_window_pattern"):
        if config.get(name) is not None:
            pattern = integer(config, name)
    if pattern is not None:
        return [(i + 1) % pattern == 0 for i in range(layers)]
    if config.get("use_sliding_window") is False or config.get("sliding_window") is None:
        return [True] * layers
    if config.get("use_sliding_window") is True:
        return [i < integer(config, "max_window_layers", default=layers) for i in range(layers)]
    return [False] * layers


def _sequence(config: Mapping[str, object], name: str, length: int | None = None) -> Sequence[object]:
    value = config[name]
    if not isinstance(value, (list, tuple, str)) or (length is not None and len(value) != length):
        raise ConfigError(
            name, value, "a list" if length is None else f"one entry for each of {length} layers"
        )
    return value
