# SPDX-License-Identifier: Apache-2.0
"""A model's Hugging Face ``config.json``: reading it, and its fields under the names that models give them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import msgspec

from router.errors import ConfigError

_NESTED = ("text_config", "llm_config", "language_config", "thinker_config")
"""Where models of several modalities keep their language model."""
_DTYPES = ("dtype", "torch_dtype")
_LARGEST_BYTES = 64 * 2**20


def load_model_config(path: str, field: str) -> dict[str, object]:
    """``config.json`` of a model directory, or the file itself; ``field`` is what errors name.

    Raises:
        ConfigError: it cannot be read, or is not a JSON object.
    """
    file = Path(path)
    if file.is_dir():
        file = file / "config.json"
    try:
        with file.open("rb") as stream:
            return msgspec.json.decode(stream.read(_LARGEST_BYTES), type=dict[str, object])
    except (OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ConfigError(field, path, f"a model directory or its config.json ({error})") from error


def text_config(config: Mapping[str, object]) -> Mapping[str, object]:
    """The part that describes the language model, with the outer dtype and quantisation where it names none."""
    for name in _NESTED:
        inner = config.get(name)
        if isinstance(inner, Mapping):
            outer = {key: config[key] for key in (*_DTYPES, "quantization_config") if key in config}
            return text_config({**outer, **inner})
    return config


def integer(config: Mapping[str, object], *names: str, default: int | None = None) -> int:
    """The first of ``names`` that is there; ``default`` where none is.

    Raises:
        ConfigError: names the first field: nowhere and no default, or not a number of at least 0 (1 where required).
    """
    least = 1 if default is None else 0
    for name in names:
        value = config.get(name)
        if value is None:
            continue
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise ConfigError(name, value, f"a whole number of at least {least}")
        return value
    if default is None:
        raise ConfigError(names[0], None, "a whole number of at least 1")
    return default


def layer_count(config: Mapping[str, object]) -> int:
    """Layers of the language model."""
    return integer(config, "num_hidden_layers", "n_layer", "n_layers", "num_layers")


def dtype_name(config: Mapping[str, object]) -> str | None:
    """``bfloat16`` and the like; None where the file names none."""
    for name in _DTYPES:
        value = config.get(name)
        if value is not None:
            return str(value).removeprefix("torch.")
    return None
