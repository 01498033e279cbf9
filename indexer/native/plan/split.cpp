// SPDX-License-Identifier: Apache-2.0
#include "split.hpp"

#include <algorithm>

namespace pointsman::plan {
namespace {

// Holders by position, those that hold the first chunk before the others.
struct Order {
  std::array<std::uint32_t, kMostHolders> positions{};
  std::size_t count = 0;
};

// The run that has the boundary before chunk `at`, its ends included; null where none does.
const Span* run_at(Spans runs, std::int64_t at) {
  for (const Span& run : runs) {
    if (run.start <= at && at <= run.end) return &run;
  }
  return nullptr;
}

Order in_order(std::span<const Holder> holders, Span missing) {
  struct Key {
    bool later;
    std::int64_t chunk;
  };
  std::array<Key, kMostHolders> keys{};
  Order order;
  for (std::uint32_t position = 0; position < holders.size(); ++position) {
    const Span* run = run_at(holders[position].runs, missing.start);
    if (run != nullptr && run->end > missing.start) {
      keys[position] = {false, std::min(run->end, missing.end)};
    } else {
      std::int64_t start = missing.end;
      for (const Span& one : holders[position].runs) {
        if (one.start <= missing.start) continue;
        start = one.start;
        break;
      }
      if (start >= missing.end) continue;
      keys[position] = {true, start};
    }
    order.positions[order.count++] = position;
  }
  std::stable_sort(order.positions.begin(), order.positions.begin() + static_cast<std::ptrdiff_t>(order.count),
                   [&](std::uint32_t a, std::uint32_t b) {
                     if (keys[a].later != keys[b].later) return keys[b].later;
                     return keys[a].chunk < keys[b].chunk;
                   });
  return order;
}

// One part of each in this order; count is 0 where one would have nothing to do, or nobody holds what is between.
Split balance(std::span<const Holder> holders, std::span<const std::uint32_t> chosen, Span missing) {
  std::array<std::int64_t, kMostParts> lows{}, highs{};
  std::int64_t reach = missing.start;
  for (std::size_t i = 0; i < chosen.size(); ++i) {
    for (std::size_t other = 0; other < i; ++other) {
      if (holders[chosen[other]].worker == holders[chosen[i]].worker) return {};
    }
    const Span* run = run_at(holders[chosen[i]].runs, reach);
    if (run == nullptr) return {};
    reach = std::min(run->end, missing.end);
    lows[i] = run->start;
    highs[i] = reach;
  }
  std::array<double, kMostParts> left{};  // bandwidth of this holder and those behind it
  double total = 0;
  for (std::size_t i = chosen.size(); i-- > 0;) {
    total += holders[chosen[i]].bytes_per_s;
    left[i] = total;
  }
  Split split;
  std::int64_t start = missing.start;
  for (std::size_t i = 0; i < chosen.size(); ++i) {
    std::int64_t cut = reach;
    if (i + 1 < chosen.size()) {
      const double share = holders[chosen[i]].bytes_per_s / left[i];
      const std::int64_t target = start + static_cast<std::int64_t>(static_cast<double>(reach - start) * share);
      cut = std::min(std::max(target, lows[i + 1]), highs[i]);
    }
    if (cut <= start) return {};
    split.parts[i] = {chosen[i], start, cut};
    start = cut;
  }
  split.count = static_cast<std::uint32_t>(chosen.size());
  return split;
}

// Until all is there, less what the chunks are worth.
double estimate_s(std::span<const Holder> holders, const Split& split, const Need& need) {
  double start_s = 0, slowest_s = 0;
  for (const Part& part : split.all()) {
    const Holder& holder = holders[part.holder];
    start_s = std::max(start_s, holder.start_s);
    slowest_s = std::max(slowest_s, static_cast<double>(part.end - part.start) * need.chunk_bytes / holder.bytes_per_s);
  }
  const auto chunks = static_cast<double>(split.parts[split.count - 1].end - need.missing.start);
  return start_s + std::max(slowest_s, chunks * need.chunk_bytes / need.bytes_per_s) - chunks * need.gain_s;
}

// Keeps what saves most.
class Best {
 public:
  Best(std::span<const Holder> holders, const Need& need, Split& best) : holders_(holders), need_(need), best_(best) {}

  void attempt(std::span<const std::uint32_t> chosen) {
    const Split split = balance(holders_, chosen, need_.missing);
    if (split.count == 0) return;
    const double estimated_s = estimate_s(holders_, split, need_);
    if (best_.count != 0 && !(estimated_s < least_s_)) return;
    best_ = split;
    least_s_ = estimated_s;
  }

 private:
  std::span<const Holder> holders_;
  const Need& need_;
  Split& best_;
  double least_s_ = 0;
};

}  // namespace

Span missing_chunks(std::int64_t prompt_tokens, std::int64_t block_size, std::int64_t chunk_blocks,
                    const Residence& residence, std::vector<Span>& own) {
  const std::int64_t most = std::max<std::int64_t>(prompt_tokens - 1, 0) / block_size;
  const std::int64_t begin = std::min(leading_blocks(residence.hbm), most) / chunk_blocks;
  chunk_runs(residence.ram, chunk_blocks, own);
  const Span* run = run_at(own, begin);
  return {run == nullptr ? begin : run->end, prompt_tokens / (block_size * chunk_blocks)};
}

std::array<Split, kMostParts - 1> splits(std::span<const Holder> holders, const Need& need) {
  std::array<Split, kMostParts - 1> found{};
  const Order order = in_order(holders, need.missing);
  Best pairs(holders, need, found[0]), triples(holders, need, found[1]);
  // In the order of itertools.combinations.
  for (std::size_t a = 0; a < order.count; ++a) {
    for (std::size_t b = a + 1; b < order.count; ++b) {
      pairs.attempt(std::array{order.positions[a], order.positions[b]});
    }
  }
  for (std::size_t a = 0; a < order.count; ++a) {
    for (std::size_t b = a + 1; b < order.count; ++b) {
      for (std::size_t c = b + 1; c < order.count; ++c) {
        triples.attempt(std::array{order.positions[a], order.positions[b], order.positions[c]});
      }
    }
  }
  return found;
}

}  // namespace pointsman::plan
