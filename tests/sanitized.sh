#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
#
# Builds the native core with AddressSanitizer and UBSan and runs the tests of the indexer and of native planning on it,
# then fuzzes for some seconds what reads bytes from the network.
#   tests/sanitized.sh [PYTHON]     an interpreter with the test extra and nanobind (default python3)
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
root=$PWD
python=${1:-python3}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

cp -r indexer router "$work/"
cmake=$("$python" -c 'import shutil, sys; print(shutil.which("cmake") or sys.exit("cmake is missing"))')
"$cmake" -S indexer/native -B "$work/build" -DPOINTSMAN_SANITIZE=ON -DCMAKE_BUILD_TYPE=RelWithDebInfo \
  -DPython_EXECUTABLE="$("$python" -c 'import sys; print(sys.executable)')" >"$work/cmake.log" || { cat "$work/cmake.log"; exit 1; }
"$cmake" --build "$work/build" -j2 >"$work/build.log" || { cat "$work/build.log"; exit 1; }
cp "$work"/build/_core*.so "$work/indexer/"

# -S: without site, so that an installed copy of the package cannot come first.
site=$("$python" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')
export PYTHONPATH="$work:$site:$root/tests/support"
export LD_PRELOAD="$(gcc -print-file-name=libasan.so):$(gcc -print-file-name=libubsan.so)"
export ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=halt_on_error=1:print_stacktrace=1
cd "$work"
"$python" -S -c "import indexer._core as c; assert c.__file__.startswith('$work'), c.__file__"
"$python" -S -m pytest -c "$root/pyproject.toml" --rootdir "$root" -p no:cacheprovider -q --noconftest \
  "$root/tests/property" "$root/tests/unit/indexer" "$root/tests/unit/router/plan/test_native_fleet.py" \
  "$root/tests/golden/test_recorded_streams.py"

unset PYTHONPATH LD_PRELOAD
"$root/tests/fuzz/run.sh" 8 "$python" "$work/fuzz"
