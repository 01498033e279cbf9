# SPDX-License-Identifier: Apache-2.0
"""A directory of KV blocks shared by workers: bounded, evicting by worth, and telling what it holds. No engine inside."""

from engine_ext.vllm.storage.config import StorageConfig, StorageConfigError, read_config
from engine_ext.vllm.storage.store import BlockStore

__all__ = ["BlockStore", "StorageConfig", "StorageConfigError", "read_config"]
