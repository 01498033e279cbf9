// SPDX-License-Identifier: Apache-2.0
#include "holder_sets.hpp"

#include <algorithm>
#include <bit>
#include <new>

#include "atomics.hpp"
#include "mix.hpp"

namespace pointsman {
namespace {

using Words = std::array<std::uint64_t, 2>;

constexpr std::uint8_t kMaxCount = 0xff;  // stays there for ever rather than be wrong by less

void change_count(std::uint8_t& count, int step) {
  if (count == kMaxCount) return;
  count = static_cast<std::uint8_t>(count + step);
}

std::uint64_t signature_of(std::span<const Holding> holdings) {
  std::uint64_t sum = holdings.size();
  for (const Holding& holding : holdings) {
    const auto [head, counts] = std::bit_cast<Words>(holding);
    sum = mix64(sum ^ mix64(counts ^ head * 0x9e3779b97f4a7c15ULL));
  }
  return sum;
}

}  // namespace

HolderSets::HolderSets(const Mapping& region, const Header& header, std::size_t holding_bytes)
    : region_(region),
      headers_(region.at<SetHeader>(header.sets)),
      max_sets_(header.max_sets),
      arena_(region, header.holdings, holding_bytes),
      state_(1),
      memos_(kMemos) {}

HolderSets::Id HolderSets::changed(Id from, const Change& change) {
  const std::uint64_t key = (std::uint64_t{from} << 32 | change.slot) ^ std::uint64_t{change.until} << 20;
  Memo& memo = memos_[mix64(key ^ std::uint64_t{change.kind} << 59 ^ std::uint64_t{change.step > 0} << 63) % kMemos];
  const bool hit = memo.from == from && memo.change == change && memo.from_version == headers_[from].version &&
                   memo.to_version == headers_[memo.to].version;
  if (hit) {
    if (memo.to != kNobody) ++state_[memo.to].blocks;
    return memo.to;
  }
  const auto old = holdings(from);
  scratch_.assign(old.begin(), old.end());
  auto it = std::ranges::lower_bound(scratch_, change.slot, {}, &Holding::slot);
  if (it == scratch_.end() || it->slot != change.slot) it = scratch_.insert(it, Holding{.slot = change.slot});
  change_count(it->counts[change.kind], change.step);
  if (change.kind == kDemoting) it->until = it->counts[kDemoting] == 0 ? 0 : std::max(it->until, change.until);
  if (it->empty()) scratch_.erase(it);
  const Id to = find_or_add(scratch_);
  if (to != kNobody) ++state_[to].blocks;
  memo = {from, to, headers_[from].version, headers_[to].version, change};
  return to;
}

HolderSets::Id HolderSets::find_or_add(std::span<const Holding> content) {
  if (content.empty()) return kNobody;
  const std::uint64_t signature = signature_of(content);
  for (auto [it, end] = by_signature_.equal_range(signature); it != end; ++it) {
    if (std::ranges::equal(holdings(it->second), content)) return it->second;
  }
  if (free_.empty() && state_.size() >= max_sets_) throw std::bad_alloc();
  const Arena::Unit unit = arena_.allocate(units_of(content.size()));
  Id id = static_cast<Id>(state_.size());
  if (free_.empty()) {
    state_.emplace_back();
    store(headers_[id].version, 1U);
  } else {
    id = free_.back();
    free_.pop_back();
  }
  store(headers_[id].unit, unit);
  write(headers_[id], content);
  state_[id] = {0, signature};
  by_signature_.emplace(signature, id);
  return id;
}

// The version is odd from when the set was freed until its new content is whole.
void HolderSets::write(SetHeader& set, std::span<const Holding> content) {
  auto* words = region_.at<std::uint64_t>(set.unit * Arena::kUnitBytes);
  for (const Holding& holding : content) {
    for (const std::uint64_t word : std::bit_cast<Words>(holding)) store(*words++, word);
  }
  store(set.size, static_cast<std::uint32_t>(content.size()));
  store(set.version, set.version + 1);
}

void HolderSets::release(Id id) {
  if (id == kNobody) return;
  State& state = state_[id];
  if (--state.blocks != 0) return;
  for (auto [it, end] = by_signature_.equal_range(state.signature); it != end; ++it) {
    if (it->second == id) {
      by_signature_.erase(it);
      break;
    }
  }
  SetHeader& set = headers_[id];
  store(set.version, set.version + 1);
  arena_.free(set.unit, units_of(set.size));
  free_.push_back(id);
}

std::size_t HolderSets::memory_bytes() const {
  constexpr std::size_t kNodeBytes = 6 * sizeof(void*);  // of by_signature_, its bucket included
  return state_.size() * sizeof(SetHeader) + state_.capacity() * sizeof(State) + free_.capacity() * sizeof(Id) +
         memos_.size() * sizeof(Memo) + by_signature_.size() * kNodeBytes + arena_.used_bytes();
}

bool HolderSets::consistent(std::span<const std::uint32_t> references) const {
  std::size_t live = 0;
  for (Id id = 1; id < state_.size(); ++id) {
    const State& state = state_[id];
    if (state.blocks != references[id] || (state.blocks != 0) == (headers_[id].version % 2 != 0)) return false;
    if (state.blocks == 0) continue;
    ++live;
    const auto content = holdings(id);
    if (content.empty() || !std::ranges::is_sorted(content, {}, &Holding::slot)) return false;
    std::size_t same = 0;
    for (auto [it, end] = by_signature_.equal_range(state.signature); it != end; ++it) {
      same += std::ranges::equal(holdings(it->second), content);
    }
    if (same != 1) return false;
  }
  return live == by_signature_.size();
}

}  // namespace pointsman
