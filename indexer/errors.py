# SPDX-License-Identifier: Apache-2.0
"""Errors of the indexer.

IndexerError
├── HashKeyError        the key file is unreadable, has the wrong size, or differs from the deployment's
├── WireError           bytes that are not a KV event batch (the batch is dropped and counted)
└── ReplayError         the replay endpoint answered with something that is not the replay protocol
"""


class IndexerError(Exception):
    """Base of every error raised by the indexer."""


class HashKeyError(IndexerError):
    """The key of the request hashes cannot be used."""


class WireError(IndexerError):
    """The payload is not a KV event batch."""


class ReplayError(IndexerError):
    """A frame from a replay endpoint breaks the replay protocol."""
