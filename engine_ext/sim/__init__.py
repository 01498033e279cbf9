# SPDX-License-Identifier: Apache-2.0
"""A simulated vLLM worker: one engine core in real time (a server) or in virtual time (a replay)."""
