# SPDX-License-Identifier: Apache-2.0
"""What runs in vLLM's worker processes: pages between its KV caches and the shared host region."""
