// SPDX-License-Identifier: Apache-2.0
#include "batches.hpp"

#include <cstring>

namespace pointsman {
namespace {

// Both halves of a 128-bit product, mixed.
std::uint64_t folded(std::uint64_t a, std::uint64_t b) {
  __extension__ using Product = unsigned __int128;
  const auto product = static_cast<Product>(a) * b;
  return static_cast<std::uint64_t>(product) ^ static_cast<std::uint64_t>(product >> 64);
}

}  // namespace

ManyCounts apply_many(PrefixIndex& index, std::span<const SlotId> ranks, std::uint32_t default_rank, SlotId store,
                      std::span<const std::string_view> payloads, double now_s) {
  static constexpr std::uint64_t ApplyCounts::* kSummed[] = {
      &ApplyCounts::stored,           &ApplyCounts::removed,        &ApplyCounts::clears,
      &ApplyCounts::detached,         &ApplyCounts::joined,         &ApplyCounts::unidentified,
      &ApplyCounts::unknown_removals, &ApplyCounts::dropped_waiting, &ApplyCounts::conflicts,
      &ApplyCounts::malformed_events, &ApplyCounts::unknown_events, &ApplyCounts::unknown_medium_events,
      &ApplyCounts::sparse_events,    &ApplyCounts::evicted,
  };
  ManyCounts many;
  for (const std::string_view payload : payloads) {
    const auto* data = reinterpret_cast<const std::uint8_t*>(payload.data());
    const ApplyCounts counts = index.apply(ranks, default_rank, store, data, payload.size(), now_s);
    for (const auto field : kSummed) many.sum.*field += counts.*field;
    many.malformed_batches += counts.malformed_batch;
  }
  many.sum.malformed_batch = many.malformed_batches != 0;
  return many;
}

std::uint64_t digest(std::string_view payload) {
  constexpr std::uint64_t kFirst = 0x9e3779b97f4a7c15ULL, kSecond = 0xd1b54a32d192ed03ULL;
  std::uint64_t state = folded(payload.size() ^ kSecond, kFirst);
  while (!payload.empty()) {
    std::uint64_t words[2] = {0, 0};
    const std::size_t size = payload.size() < sizeof words ? payload.size() : sizeof words;
    std::memcpy(words, payload.data(), size);
    state = folded(state ^ words[0] ^ kFirst, words[1] ^ kSecond) + words[0];
    payload.remove_prefix(size);
  }
  return folded(state ^ kSecond, kFirst);
}

}  // namespace pointsman
