#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
#
# Fuzzes what reads bytes from the network in the native core, with AddressSanitizer and UBSan: libFuzzer where there is
# a clang with it, else driver.cpp with gcc.
#   tests/fuzz/run.sh [SECONDS] [PYTHON] [FOLDER]
#     SECONDS   per target (default 10)
#     PYTHON    an interpreter with nanobind and cmake (default python3)
#     FOLDER    kept between runs: build, corpus, inputs that ended a run (default: a temporary one)
#   POINTSMAN_FUZZ_ENGINE=driver    never libFuzzer
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
seconds=${1:-10}
python=${2:-python3}
folder=${3:-}
if [[ -z $folder ]]; then
  folder=$(mktemp -d)
  trap 'rm -rf "$folder"' EXIT
fi
mkdir -p "$folder"

cat >"$folder/probe.cpp" <<'CPP'
#include <cstdint>
#include <span>
extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t*, std::size_t) { return 0; }
CPP
engine=driver
compiler=$(command -v g++)
if [[ ${POINTSMAN_FUZZ_ENGINE:-} != driver ]] && clang=$(command -v clang++) && "$clang" -std=c++20 -fsanitize=fuzzer,address,undefined \
  "$folder/probe.cpp" -o "$folder/probe" 2>/dev/null; then
  engine=libfuzzer
  compiler=$clang
fi

cmake=$("$python" -c 'import shutil, sys; print(shutil.which("cmake") or sys.exit("cmake is missing"))')
"$cmake" -S indexer/native -B "$folder/build-$engine" -DPOINTSMAN_FUZZ=$engine -DCMAKE_BUILD_TYPE=RelWithDebInfo \
  -DCMAKE_CXX_COMPILER="$compiler" -DPython_EXECUTABLE="$("$python" -c 'import sys; print(sys.executable)')" \
  >"$folder/cmake.log" 2>&1 || { cat "$folder/cmake.log"; exit 1; }
"$cmake" --build "$folder/build-$engine" -j2 --target fuzz_batch fuzz_query >"$folder/build.log" 2>&1 || {
  cat "$folder/build.log"
  exit 1
}
"$python" tests/fuzz/seeds.py "$folder/seeds"

export ASAN_OPTIONS=abort_on_error=0 UBSAN_OPTIONS=halt_on_error=1:print_stacktrace=1
cd "$folder"
for target in batch query; do
  echo "fuzz $target with $engine, $seconds s"
  if [[ $engine == libfuzzer ]]; then
    mkdir -p "corpus-$target"
    "build-$engine/fuzz_$target" -max_total_time="$seconds" -max_len=65536 -timeout=60 -rss_limit_mb=4096 -verbosity=0 \
      -print_final_stats=1 "corpus-$target" "seeds/$target" 2>&1 | tee "$target.log" |
      grep -E 'executed_units|average_exec|ERROR|SUMMARY|broken|runtime error' || true
    # The pipe hides the target's own exit code.
    grep -q 'stat::number_of_executed_units' "$target.log" && ! grep -qE 'ERROR|runtime error' "$target.log" || {
      cat "$target.log"
      exit 1
    }
  else
    "build-$engine/fuzz_$target" "$seconds" "$(date +%s)" "seeds/$target"
  fi
done
