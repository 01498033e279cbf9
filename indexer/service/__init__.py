# SPDX-License-Identifier: Apache-2.0
"""The index as an HTTP service, for clients of Mooncake's indexer API (RFC 1403)."""
