# SPDX-License-Identifier: Apache-2.0
"""``pointsman`` and ``python -m router``: arguments in, exit code out."""

from __future__ import annotations

import sys

from router.cli import run


def main() -> None:
    """Run the command line and exit."""
    sys.exit(run(sys.argv[1:]))


if __name__ == "__main__":
    main()
