# SPDX-License-Identifier: Apache-2.0
"""``pointsman indexer check FILE``. Exit codes: 0 no faults, 1 faults, 2 the file is no recording."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import msgspec

from indexer.check.recording import RecordingError, read_recording
from indexer.check.report import as_json, as_text
from indexer.check.validator import Validator

EXIT_OK = 0
EXIT_FAULTS = 1
EXIT_USAGE = 2


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of the command."""
    parser.add_argument("file", metavar="FILE", help="a recorded stream: JSON lines, gzipped or not")
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")


def run(args: argparse.Namespace) -> int:
    """Check a recording and print what was found; returns the exit code."""
    validator = Validator()
    try:
        for message in read_recording(Path(args.file)):
            validator.feed(message)
    except RecordingError as error:
        return _usage(args.file, str(error))
    if validator.report.messages == 0:
        return _usage(args.file, "no messages")
    report = validator.report
    print(msgspec.json.encode(as_json(report)).decode() if args.json else as_text(report))
    return EXIT_OK if report.ok else EXIT_FAULTS


def _usage(file: str, problem: str) -> int:
    accepted = "a recorded stream, one JSON message a line"
    print(f"pointsman indexer check: FILE: {file}: {problem}; accepted: {accepted}", file=sys.stderr)
    return EXIT_USAGE
