# SPDX-License-Identifier: Apache-2.0
"""placeholder"""


def run(*, workers: int, once: bool) -> int:
    return 0
