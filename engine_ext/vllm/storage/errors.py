# SPDX-License-Identifier: Apache-2.0
"""What I/O on the store can come to. None of these reaches the scheduler: jobs fail and are counted instead.

StorageError
+- BlockMissing    no such file
+- BlockDefective  a file that is not the block; it is removed
+- LedgerBusy      another worker holds the lock on the ledger and does not give it up
+- NoRoom          the blocks do not fit though everything else were evicted
"""

from __future__ import annotations


class StorageError(Exception):
    """The root of the tree."""


class BlockMissing(StorageError):
    """The file is gone, or never was."""


class BlockDefective(StorageError):
    """The file is not whole, or belongs to another block or fingerprint."""


class LedgerBusy(StorageError):
    """The ledger's lock could not be had in time."""


class NoRoom(StorageError):
    """More bytes at once than the capacity."""
