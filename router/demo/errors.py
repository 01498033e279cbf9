# SPDX-License-Identifier: Apache-2.0
"""What can go wrong in the demo."""

from __future__ import annotations

from router.errors import RouterError


class DemoError(RouterError):
    """The demo cannot go on; the message is for its user (exit code 1)."""
