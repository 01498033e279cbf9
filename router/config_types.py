# SPDX-License-Identifier: Apache-2.0
"""Ranges that several sections of the configuration use."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

Port = Annotated[int, Meta(ge=0, le=65535)]
Seconds = Annotated[float, Meta(gt=0, le=86400)]
Count = Annotated[int, Meta(ge=1, le=2**40)]
