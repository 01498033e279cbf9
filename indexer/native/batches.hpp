// SPDX-License-Identifier: Apache-2.0
// Many batches of one stream at once: what each costs beside its events is paid once.
#pragma once

#include <cstdint>
#include <span>
#include <string_view>

#include "index.hpp"

namespace pointsman {

struct ManyCounts {
  ApplyCounts sum;
  std::uint64_t malformed_batches = 0;
};

// Applies the batches in order, each as PrefixIndex::apply does. O(their sum); questions are answered in between.
ManyCounts apply_many(PrefixIndex& index, std::span<const SlotId> ranks, std::uint32_t default_rank, SlotId store,
                      std::span<const std::string_view> payloads, double now_s = 0);

// 64 bits that tell whether two payloads have the same bytes. Not keyed: who sends both may make them equal on purpose,
// and deceives only about itself. O(bytes), some 10 GB/s.
[[nodiscard]] std::uint64_t digest(std::string_view payload);

}  // namespace pointsman
