# SPDX-License-Identifier: Apache-2.0
"""Pointsman inside vLLM: offloading spec, peer tier, storage tier, eviction policy, reports."""
