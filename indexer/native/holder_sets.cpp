// SPDX-License-Identifier: Apache-2.0
#include "holder_sets.hpp"

#include <algorithm>

#include "flat_map.hpp"

namespace pointsman {
namespace {

constexpr std::uint16_t kMaxCount = 0xffff;  // counts stay there rather than wrap

void change_count(std::uint16_t& count, int step) {
  if (step > 0 && count < kMaxCount) ++count;
  if (step < 0 && count > 0) --count;
}

std::uint64_t signature_of(std::span<const Holding> holdings) {
  std::uint64_t sum = holdings.size();
  for (const Holding& holding : holdings) {
    std::uint64_t counts = 0;
    for (const std::uint16_t count : holding.counts) counts = counts << 16 | count;
    sum = mix64(sum ^ mix64(counts ^ (std::uint64_t{holding.slot} << 32 | holding.slot)));
  }
  return sum;
}

}  // namespace

HolderSets::HolderSets() : sets_(1), memos_(kMemos) {}

HolderSets::Id HolderSets::move(Id from, SlotId slot, std::size_t kind, int step) {
  const auto change = static_cast<std::uint32_t>(kind * 2 + (step > 0));
  const std::uint64_t key = std::uint64_t{from} << 32 | (slot * 8 + change);
  Memo& memo = memos_[mix64(key) % kMemos];
  const bool hit = memo.slot == slot && memo.from == from && memo.change == change &&
                   memo.from_generation == sets_[from].generation && known(memo.to, memo.to_generation);
  Id to = memo.to;
  if (!hit) {
    const auto old = holdings(from);
    scratch_.assign(old.begin(), old.end());
    auto it = std::lower_bound(scratch_.begin(), scratch_.end(), slot,
                               [](const Holding& one, SlotId id) { return one.slot < id; });
    if (it == scratch_.end() || it->slot != slot) it = scratch_.insert(it, Holding{.slot = slot});
    change_count(it->counts[kind], step);
    if (it->empty()) scratch_.erase(it);
    to = find_or_add(scratch_);
    memo = {from, to, sets_[from].generation, sets_[to].generation, slot, change};
  }
  if (to != kNobody) ++sets_[to].blocks;
  if (from != kNobody) release(from);
  return to;
}

// The caller names the set before anything else can free it: a new one has no blocks yet.
HolderSets::Id HolderSets::find_or_add(std::vector<Holding>& content) {
  if (content.empty()) return kNobody;
  const std::uint64_t signature = signature_of(content);
  for (auto [it, end] = by_signature_.equal_range(signature); it != end; ++it) {
    if (std::ranges::equal(holdings(it->second), content)) return it->second;
  }
  Id id = static_cast<Id>(sets_.size());
  if (free_.empty()) {
    sets_.emplace_back();
  } else {
    id = free_.back();
    free_.pop_back();
  }
  Set& set = sets_[id];
  set.holdings = std::make_unique<Holding[]>(content.size());
  std::ranges::copy(content, set.holdings.get());
  set.size = static_cast<std::uint32_t>(content.size());
  set.signature = signature;
  ++set.generation;
  holding_bytes_ += content.size() * sizeof(Holding);
  by_signature_.emplace(signature, id);
  return id;
}

void HolderSets::release(Id id) {
  Set& set = sets_[id];
  if (--set.blocks != 0) return;
  for (auto [it, end] = by_signature_.equal_range(set.signature); it != end; ++it) {
    if (it->second == id) {
      by_signature_.erase(it);
      break;
    }
  }
  holding_bytes_ -= set.size * sizeof(Holding);
  set.holdings.reset();
  set.size = 0;
  free_.push_back(id);
}

std::size_t HolderSets::memory_bytes() const {
  constexpr std::size_t kNodeBytes = 4 * sizeof(void*);  // of by_signature_, its bucket included
  return sets_.capacity() * sizeof(Set) + free_.capacity() * sizeof(Id) + memos_.size() * sizeof(Memo) +
         by_signature_.size() * kNodeBytes + holding_bytes_;
}

bool HolderSets::consistent(std::span<const std::uint32_t> references) const {
  std::size_t live = 0;
  for (Id id = 1; id < sets_.size(); ++id) {
    const Set& set = sets_[id];
    if (set.blocks != references[id]) return false;
    if (set.blocks == 0) continue;
    ++live;
    const auto content = holdings(id);
    if (content.empty() || !std::ranges::is_sorted(content, {}, &Holding::slot)) return false;
    std::size_t same = 0;
    for (auto [it, end] = by_signature_.equal_range(set.signature); it != end; ++it) {
      same += std::ranges::equal(holdings(it->second), content);
    }
    if (same != 1) return false;
  }
  return live == by_signature_.size();
}

}  // namespace pointsman
