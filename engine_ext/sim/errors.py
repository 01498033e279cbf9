# SPDX-License-Identifier: Apache-2.0
"""Errors of the simulated engine.

SimError
├── SimConfigError        bad option (exit code 2): names the field, the value and what is accepted
├── PromptTooLongError         prompt and output do not fit the model (400)
└── KvRequestIdInUseError      two live requests name one kv_request_id (500: vLLM's engine asserts)
"""

from __future__ import annotations


class SimError(Exception):
    """Base of every error raised by the simulated engine."""


class SimConfigError(SimError):
    """Bad option."""

    def __init__(self, field: str, value: object, accepted: str) -> None:
        self.field = field
        self.value = value
        self.accepted = accepted
        super().__init__(f"{field}: {value!r} is not accepted; accepted: {accepted}")


class PromptTooLongError(SimError):
    """The prompt leaves no room for a single output token."""


class KvRequestIdInUseError(SimError):
    """A second live request under one ``kv_request_id``; it trips an assertion in vLLM's P2P client."""
