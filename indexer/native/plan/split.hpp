// SPDX-License-Identifier: Apache-2.0
// Which part of a prompt to take from which of several peers at once. Mirrors router/plan/split.py, which says how;
// positions are chunks.
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <vector>

#include "walk.hpp"

namespace pointsman::plan {

inline constexpr std::size_t kMostParts = 3;
inline constexpr std::size_t kMostHolders = 4;

struct Holder {
  std::uint32_t worker = 0;
  Spans runs;  // chunks; between two runs there is a gap
  double bytes_per_s = 1;
  double start_s = 0;  // session and lookup
};

// What the destination lacks, and what a chunk of it is worth.
struct Need {
  Span missing;  // chunks
  double chunk_bytes = 0;
  double gain_s = 0;       // that a chunk takes less to promote than to compute, on average
  double bytes_per_s = 1;  // of its own link, for all that it pulls at once
};

// Chunks [start, end) from one holder, by its position.
struct Part {
  std::uint32_t holder = 0;
  std::int64_t start = 0;
  std::int64_t end = 0;
};

struct Split {
  std::array<Part, kMostParts> parts{};
  std::uint32_t count = 0;

  [[nodiscard]] std::span<const Part> all() const { return std::span(parts).first(count); }
};

// The chunks of a prompt behind the leading ones that the destination has in HBM and RAM; `own` is scratch.
Span missing_chunks(std::int64_t prompt_tokens, std::int64_t block_size, std::int64_t chunk_blocks,
                    const Residence& residence, std::vector<Span>& own);

// The most promising split over two holders (first) and over three; count is 0 where there is none. At most
// kMostHolders.
std::array<Split, kMostParts - 1> splits(std::span<const Holder> holders, const Need& need);

}  // namespace pointsman::plan
