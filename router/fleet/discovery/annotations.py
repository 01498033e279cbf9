# SPDX-License-Identifier: Apache-2.0
"""What a pod says of itself: annotations ``pointsman.io/NAME``, or labels of the same names. Pure.

    events-port  replay-port  p2p-port  extension-port   ports of rank 0; "none" where a default does not hold
    ranks  chunk-blocks  block-size-tokens               whole numbers
    role  transfer  fingerprint                          as in fleet.workers

The role may also be the label ``llm-d.ai/role``, whose values ``prefill-decode`` and ``both`` mean both.
"""

from __future__ import annotations

from collections.abc import Mapping

from msgspec.structs import replace

from router.config_discovery import PodDefaults
from router.fleet.discovery.objects import Metadata

PREFIX = "pointsman.io/"
_PORTS = ("events_port", "replay_port", "p2p_port", "extension_port")
_NUMBERS = {
    **dict.fromkeys(_PORTS, (1, 65535)),
    "ranks": (1, 1024),
    "chunk_blocks": (1, 65536),
    "block_size_tokens": (8, 65536),
}
_WORDS = {"role": ("both", "prefill", "decode"), "transfer": ("p2p", "nixl")}
_LLM_D_ROLE = "llm-d.ai/role"
_LLM_D_ROLES = {"both": "both", "prefill-decode": "both", "prefill": "prefill", "decode": "decode"}


class AnnotationError(ValueError):
    """An annotation has a value that is not accepted; names it and what is."""


def settings_of(metadata: Metadata, defaults: PodDefaults) -> PodDefaults:
    """The defaults with what the pod says laid over them.

    Raises:
        AnnotationError: a value that is not accepted, or a name of ours that means nothing.
    """
    labels, annotations = metadata.labels or {}, metadata.annotations or {}
    given: dict[str, object] = {}
    role = _LLM_D_ROLES.get(labels.get(_LLM_D_ROLE, ""))
    if role is not None:
        given["role"] = role
    for source in (labels, annotations):
        given.update(_ours(source))
    return replace(defaults, **given)


def _ours(source: Mapping[str, str]) -> dict[str, object]:
    values: dict[str, object] = {}
    for key, text in source.items():
        if key.startswith(PREFIX):
            name = key[len(PREFIX) :].replace("-", "_")
            values[name] = _value(key, name, text.strip())
    return values


def _value(key: str, name: str, text: str) -> object:
    if name in _PORTS and text == "none":
        return None
    if name in _NUMBERS:
        least, most = _NUMBERS[name]
        if text.isascii() and text.isdigit() and least <= int(text[:9]) <= most:
            return int(text)
        raise AnnotationError(f"{key}: {text!r} is not accepted; accepted: a number from {least} to {most}")
    if name in _WORDS:
        if text in _WORDS[name]:
            return text
        raise AnnotationError(f"{key}: {text!r} is not accepted; accepted: {', '.join(_WORDS[name])}")
    if name == "fingerprint":
        return text or None
    known = ", ".join(sorted(word.replace("_", "-") for word in (*_NUMBERS, *_WORDS, "fingerprint")))
    raise AnnotationError(f"{key} is not known; known: {known}")
