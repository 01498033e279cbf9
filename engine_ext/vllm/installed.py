# SPDX-License-Identifier: Apache-2.0
"""The row of `compat.py` for the vLLM of this process."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from .compat import Traits, traits_of, unknown_is_allowed


def installed_version() -> str:
    """The full version string, e.g. `0.32.0+cpu`."""
    from vllm.version import __version__  # noqa: PLC0415 - the plugin reads it where nothing else of vLLM is loaded

    return str(__version__)


def installed_traits(extra_config: Mapping[str, Any] | None = None) -> Traits:
    """What this vLLM is like.

    Args:
        extra_config: `kv_connector_extra_config`, where that is known already.

    Raises:
        UnsupportedVllm: it is not in the table, and nobody allowed that.
    """
    return traits_of(installed_version(), allow_unknown=unknown_is_allowed(extra_config or {}, os.environ))
