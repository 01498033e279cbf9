// SPDX-License-Identifier: Apache-2.0
// Which blocks the engine would load from where. Mirrors router/plan/paths.py.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <span>
#include <vector>

namespace pointsman::plan {

struct Span {
  std::int64_t start;
  std::int64_t end;
};
using Spans = std::span<const Span>;

// Places below HBM in the order of the engine's lookup.
enum Place : std::uint8_t { kRam = 0, kPeer = 1, kStorage = 2 };
inline constexpr std::size_t kPlaces = 3;

struct Residence {
  Spans hbm;
  Spans ram;
  Spans storage;
};

struct Loads {
  std::int64_t hbm = 0;
  std::array<std::int64_t, kPlaces> below{};  // by place

  [[nodiscard]] std::int64_t total() const { return hbm + below[kRam] + below[kPeer] + below[kStorage]; }
  void add(const Loads& other) {
    hbm += other.hbm;
    for (std::size_t place = 0; place < kPlaces; ++place) below[place] += other.below[place];
  }
};

struct PlaceRun {
  Place place;
  std::int64_t blocks;
};

// What the engine finds of one prompt, in its order.
struct Walk {
  std::int64_t hbm = 0;
  std::int64_t external = 0;   // blocks of all runs
  std::vector<PlaceRun> runs;  // neighbours differ in place

  [[nodiscard]] Loads loads(std::int64_t most_external) const {
    Loads found{.hbm = hbm};
    for (const PlaceRun& run : runs) {
      const std::int64_t taken = run.blocks < most_external ? run.blocks : most_external;
      found.below[run.place] += taken;
      most_external -= taken;
    }
    return found;
  }
  // Where the block behind that many would come from; false where from elsewhere or nowhere.
  [[nodiscard]] bool is_behind(Place place, std::int64_t behind) const {
    for (const PlaceRun& run : runs) {
      if (behind < run.blocks) return run.place == place;
      behind -= run.blocks;
    }
    return false;
  }
  // From the first block that comes from a peer to the last, with `most_external` of those behind the HBM hit.
  [[nodiscard]] Span pulled(std::int64_t most_external) const {
    Span found{-1, -1};
    std::int64_t position = hbm;
    for (const PlaceRun& run : runs) {
      const std::int64_t taken = run.blocks < most_external ? run.blocks : most_external;
      if (run.place == kPeer && taken > 0) {
        if (found.start < 0) found.start = position;
        found.end = position + taken;
      }
      position += run.blocks;
      most_external -= taken;
    }
    return found;
  }
  // Blocks of [start, end) that come from a peer.
  [[nodiscard]] std::int64_t pulled_within(std::int64_t start, std::int64_t end) const {
    std::int64_t position = hbm, total = 0;
    for (const PlaceRun& run : runs) {
      if (run.place == kPeer) {
        const std::int64_t first = position > start ? position : start;
        const std::int64_t last = position + run.blocks < end ? position + run.blocks : end;
        if (last > first) total += last - first;
      }
      position += run.blocks;
    }
    return total;
  }
  [[nodiscard]] bool finds(Place place) const {
    for (const PlaceRun& run : runs) {
      if (run.place == place) return true;
    }
    return false;
  }
};

// Spans in chunks, made where a chunk is more than a block.
class WalkScratch {
 public:
  Spans chunks(Place place, Spans blocks, std::int64_t chunk_blocks);

 private:
  std::array<std::vector<Span>, kPlaces> chunks_;
};

// Blocks of the run that starts at block 0.
std::int64_t leading_blocks(Spans spans);
// Runs of chunks in spans of blocks, those that touch joined.
void chunk_runs(Spans blocks, std::int64_t chunk_blocks, std::vector<Span>& runs);

// Blocks that the engine finds in HBM: it always computes at least the last token.
inline std::int64_t hbm_blocks(std::int64_t prompt_tokens, std::int64_t block_size, const Residence& residence) {
  return std::min(leading_blocks(residence.hbm), std::max<std::int64_t>(prompt_tokens - 1, 0) / block_size);
}

void derive_walk(std::int64_t prompt_tokens, std::int64_t block_size, std::int64_t chunk_blocks,
                 const Residence& residence, Spans peer_ram, WalkScratch& scratch, Walk& walk);

// The most blocks behind an HBM hit, at most `external`, that end with a chunk; 0 for less than one.
constexpr std::int64_t whole_chunks(std::int64_t hbm, std::int64_t external, std::int64_t chunk_blocks) {
  const std::int64_t fitting = (hbm + external) / chunk_blocks * chunk_blocks - hbm;
  return fitting >= chunk_blocks ? fitting : 0;
}

}  // namespace pointsman::plan
