# SPDX-License-Identifier: Apache-2.0
"""The control channel between peers: handshake, lookups and leases, over ZeroMQ."""
