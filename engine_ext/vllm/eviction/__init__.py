# SPDX-License-Identifier: Apache-2.0
"""Which chunks of the host tier to give up. Pure: no vLLM, no clock; `engine_ext.vllm.policy` is the adapter."""
