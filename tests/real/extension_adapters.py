# SPDX-License-Identifier: Apache-2.0
"""Adapters that are replaced: the hashes of vLLM's requests, and what the manager stores of them.

Played by extension_scenarios.py in the engine's venv.
"""

from __future__ import annotations

import contextlib
import inspect
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from offloading import EXTRA, offloading_config
from vllm.lora.request import LoRARequest
from vllm.v1.core import kv_cache_utils
from vllm.v1.engine.core import EngineCore
from vllm.v1.kv_offload.base import ReqContext, make_offload_key

from engine_ext.vllm.adapters import hooks
from engine_ext.vllm.spec import PointsmanOffloadingSpec


class Requests:
    """Requests of one adapter, as vLLM hashes them, and their stores."""

    def __init__(self, manager: Any, folder: Path) -> None:
        self._manager = manager
        self._adapter = LoRARequest("tuned", 1, str(folder))
        self._kept: list[Any] = []
        self._keys = 0

    def load(self, *, in_place: bool = False) -> None:
        """As the API server has it loaded; the workers are left out."""
        core = SimpleNamespace(model_executor=SimpleNamespace(add_lora=lambda _: True))
        adapter = LoRARequest("tuned", 1, self._adapter.lora_path, load_inplace=in_place)
        EngineCore.add_lora(core, adapter)

    def hashed(self, name: str) -> tuple[ReqContext, list[Any]]:
        request = SimpleNamespace(request_id=name, lora_request=self._adapter)
        self._kept.append(request)
        keys = kv_cache_utils._gen_lora_extra_hash_keys(request)
        assert keys == kv_cache_utils._gen_lora_extra_hash_keys(request)
        context = ReqContext(name)
        self._manager.on_new_request(context)
        return context, keys

    def stored(self, context: ReqContext) -> int:
        """How many of two new chunks the manager takes."""
        keys = [make_offload_key(bytes([self._keys + i]) * 32, 0) for i in range(2)]
        self._keys += 2
        output = self._manager.prepare_store(keys, context)
        self._manager.complete_store(output.keys_to_store, context) if output.keys_to_store else None
        return len(output.keys_to_store)


def adapters() -> dict[str, Any]:
    """A request before a reload, one between the write and the reload, one after it, and one without an adapter."""
    annotation = _adapter_type()
    spec = PointsmanOffloadingSpec(offloading_config(EXTRA | {"cpu_bytes_to_use": 64 * 4096}))
    one = spec.get_manager()
    hook = kv_cache_utils._gen_lora_extra_hash_keys
    with (
        tempfile.TemporaryDirectory() as root,
        one.lock if spec.traits.manager_has_lock else contextlib.nullcontext(),
    ):
        weights = Path(root, "adapter_model.safetensors")
        weights.write_bytes(b"old")
        requests = Requests(one, Path(root))
        requests.load()
        early, early_keys = requests.hashed("early")
        stored = [requests.stored(early)]
        weights.write_bytes(b"newer")
        between, between_keys = requests.hashed("between")
        stored += [requests.stored(early), requests.stored(between)]
        requests.load(in_place=True)
        late, late_keys = requests.hashed("late")
        stored += [requests.stored(early), requests.stored(between), requests.stored(late)]
        plain = ReqContext("plain")
        one.on_new_request(plain)
        stored.append(requests.stored(plain))
    one.shutdown()
    return {
        "stored": stored,
        "words": len({keys[0][3] for keys in (early_keys, between_keys, late_keys)}),
        "stock": early_keys[0][:2],
        "told": kv_cache_utils.to_event_extra_keys([tuple(early_keys)]),
        "plain": hook(SimpleNamespace(lora_request=None)),
        "once": hooks.watch_adapters() is hook.revisions,
        "decoded": _adapter_type() is annotation is LoRARequest,
        "refused": _refused(hook),
    }


def _adapter_type() -> Any:
    """By which vLLM decodes what the API server sends."""
    return inspect.signature(EngineCore.add_lora).parameters["lora_request"].annotation


def _refused(hook: Any) -> list[str]:
    """What a start says where vLLM hashes adapters in another way."""
    said = []
    for other in (None, lambda request: [("lora", "name")], list):
        kv_cache_utils._gen_lora_extra_hash_keys = other
        try:
            hooks.watch_adapters()
        except hooks.AdapterHookMissing:
            said.append("refused")
    kv_cache_utils._gen_lora_extra_hash_keys = hook
    return said
