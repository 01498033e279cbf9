// SPDX-License-Identifier: Apache-2.0
#include "walk.hpp"

#include <algorithm>
#include <limits>

namespace pointsman::plan {
namespace {

constexpr std::int64_t kNever = std::numeric_limits<std::int64_t>::max();

constexpr std::int64_t ceil_div(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }

// The spans of one place, read from the front: the walk only goes forward.
class Reader {
 public:
  explicit Reader(Spans spans) : spans_(spans) {}

  // The span that has `chunk`, or the next one behind it; null when there is none.
  const Span* at_or_after(std::int64_t chunk) {
    while (next_ < spans_.size() && spans_[next_].end <= chunk) ++next_;
    return next_ < spans_.size() ? &spans_[next_] : nullptr;
  }

 private:
  Spans spans_;
  std::size_t next_ = 0;
};

}  // namespace

std::int64_t leading_blocks(Spans spans) { return !spans.empty() && spans[0].start == 0 ? spans[0].end : 0; }

void chunk_runs(Spans blocks, std::int64_t chunk_blocks, std::vector<Span>& runs) {
  runs.clear();
  for (const Span& span : blocks) {
    const std::int64_t start = ceil_div(span.start + 1, chunk_blocks) - 1;
    const std::int64_t end = span.end / chunk_blocks;
    if (start >= end) continue;
    if (!runs.empty() && runs.back().end == start) {
      runs.back().end = end;
    } else {
      runs.push_back({start, end});
    }
  }
}

Spans WalkScratch::chunks(Place place, Spans blocks, std::int64_t chunk_blocks) {
  if (chunk_blocks == 1) return blocks;
  chunk_runs(blocks, chunk_blocks, chunks_[place]);
  return chunks_[place];
}

void derive_walk(std::int64_t prompt_tokens, std::int64_t block_size, std::int64_t chunk_blocks,
                 const Residence& residence, Spans peer_ram, WalkScratch& scratch, Walk& walk) {
  walk.runs.clear();
  walk.external = 0;
  walk.hbm = hbm_blocks(prompt_tokens, block_size, residence);
  if (residence.ram.empty() && peer_ram.empty() && residence.storage.empty()) return;
  std::array<Reader, kPlaces> places{Reader(scratch.chunks(kRam, residence.ram, chunk_blocks)),
                                     Reader(scratch.chunks(kPeer, peer_ram, chunk_blocks)),
                                     Reader(scratch.chunks(kStorage, residence.storage, chunk_blocks))};
  const std::int64_t end = prompt_tokens / (block_size * chunk_blocks);
  std::int64_t chunk = walk.hbm / chunk_blocks;
  std::int64_t position = walk.hbm;
  while (chunk < end) {
    // The nearest place that has the chunk stays the nearest until its span ends or a nearer place begins.
    std::int64_t reach = kNever;
    std::size_t place = 0;
    bool found = false;
    for (; place < kPlaces && !found; ++place) {
      const Span* span = places[place].at_or_after(chunk);
      if (span == nullptr) continue;
      found = span->start <= chunk;
      reach = std::min(reach, found ? span->end : span->start);
    }
    if (!found) break;
    --place;
    chunk = std::min(reach, end);
    const std::int64_t blocks = chunk * chunk_blocks - position;
    position += blocks;
    if (!walk.runs.empty() && walk.runs.back().place == place) {
      walk.runs.back().blocks += blocks;
    } else {
      walk.runs.push_back({static_cast<Place>(place), blocks});
    }
  }
  walk.external = position - walk.hbm;
  if (walk.external >= chunk_blocks) return;
  walk.external = 0;
  walk.runs.clear();
}

}  // namespace pointsman::plan
