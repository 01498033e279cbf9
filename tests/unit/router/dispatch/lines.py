# SPDX-License-Identifier: Apache-2.0
"""A decision log in memory."""

from __future__ import annotations

from router.decisions.lines import Joined


class Lines:
    """A log in memory."""

    def __init__(self) -> None:
        self.lines: list[bytes] = []

    def write(self, line: bytes) -> None:
        self.lines.append(line)

    def joined(self) -> Joined:
        joined = Joined()
        for line in self.lines:
            joined.add(line)
        return joined
