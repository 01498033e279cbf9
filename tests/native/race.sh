#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
#
# Builds the index with ThreadSanitizer and lets one thread write while others read.
#   tests/native/race.sh [ROUNDS]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
native=indexer/native
sources=()
for name in mapping arena segment view node_table holder_sets hash_chain events index apply waiting graces evict query export; do
  sources+=("$native/$name.cpp")
done
"${CXX:-g++}" -std=c++20 -O1 -g -fsanitize=thread -I "$native" -o "$work/shared_index" tests/native/shared_index.cpp "${sources[@]}" -pthread
TSAN_OPTIONS=halt_on_error=1 "$work/shared_index" "${1:-4000}"
