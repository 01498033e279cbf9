# SPDX-License-Identifier: Apache-2.0
"""The subset hint, in both encodings that proxies use: one text with commas, or a list of texts."""

from __future__ import annotations


def entries_of(value: object) -> tuple[str, ...]:
    """Endpoints that the hint names. What is neither a text nor a list names none, so nothing may be picked then."""
    if isinstance(value, str):
        return tuple(part for piece in value.split(",") if (part := piece.strip()))
    if isinstance(value, list | tuple):
        return tuple(part for one in value if isinstance(one, str) for part in entries_of(one))
    return ()
