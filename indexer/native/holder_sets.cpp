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

std::uint64_t signature_of(std::span<const Cluster> clusters) {
  std::uint64_t sum = clusters.size();
  for (const Cluster& one : clusters) sum = mix64(sum ^ one.name * 0x9e3779b97f4a7c15ULL);
  return sum;
}

bool same(std::span<const Cluster> a, std::span<const Cluster> b) {
  return std::ranges::equal(a, b, {}, &Cluster::name, &Cluster::name);
}

template <typename T>
void write(const Mapping& region, Arena::Unit unit, std::span<const T> content) {
  auto* words = region.at<std::uint64_t>(unit * Arena::kUnitBytes);
  for (const T& one : content) {
    for (const std::uint64_t word : std::bit_cast<Words>(one)) store(*words++, word);
  }
}

void forget(std::unordered_multimap<std::uint64_t, std::uint32_t>& known, std::uint64_t signature, std::uint32_t id) {
  for (auto [it, end] = known.equal_range(signature); it != end; ++it) {
    if (it->second != id) continue;
    known.erase(it);
    return;
  }
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
  const auto old = clusters(from);
  list_.assign(old.begin(), old.end());
  const std::uint32_t range = Cluster::range_of(change.slot);
  auto place = std::ranges::lower_bound(list_, range, {}, &Cluster::range);
  scratch_.clear();
  if (place != list_.end() && place->range() == range) {
    const auto content = holdings(*place);
    scratch_.assign(content.begin(), content.end());
  } else {
    place = list_.insert(place, Cluster{});
  }
  auto it = std::ranges::lower_bound(scratch_, change.slot, {}, &Holding::slot);
  if (it == scratch_.end() || it->slot != change.slot) it = scratch_.insert(it, Holding{.slot = change.slot});
  change_count(it->counts[change.kind], change.step);
  if (change.kind == kDemoting) it->until = it->counts[kDemoting] == 0 ? 0 : std::max(it->until, change.until);
  if (it->empty()) scratch_.erase(it);
  if (scratch_.empty()) {
    list_.erase(place);
  } else {
    *place = find_or_add(std::span<const Holding>(scratch_));
  }
  const Id to = find_or_add(std::span<const Cluster>(list_));
  if (to != kNobody) ++state_[to].blocks;
  memo = {from, to, headers_[from].version, headers_[to].version, change};
  return to;
}

// One that is new has no set yet: what follows gives it one, or drops it.
Cluster HolderSets::find_or_add(std::span<const Holding> content) {
  const std::uint64_t signature = signature_of(content);
  for (auto [it, end] = clusters_by_signature_.equal_range(signature); it != end; ++it) {
    const Cluster known = cluster(it->second);
    if (std::ranges::equal(holdings(known), content)) return known;
  }
  const Arena::Unit unit = arena_.allocate(units_of<Holding>(content.size()));
  auto number = static_cast<std::uint32_t>(clusters_.size());
  if (free_clusters_.empty()) {
    clusters_.emplace_back();
  } else {
    number = free_clusters_.back();
    free_clusters_.pop_back();
  }
  write(region_, unit, content);
  ClusterState& state = clusters_[number];
  state.sets = 0;
  ++state.uses;
  state.signature = signature;
  state.place = Cluster::place_of(unit, content.size(), Cluster::range_of(content.front().slot));
  clusters_by_signature_.emplace(signature, number);
  return cluster(number);
}

HolderSets::Id HolderSets::find_or_add(std::span<const Cluster> content) {
  if (content.empty()) return kNobody;
  const std::uint64_t signature = signature_of(content);
  for (auto [it, end] = by_signature_.equal_range(signature); it != end; ++it) {
    if (same(clusters(it->second), content)) return it->second;
  }
  Arena::Unit unit = 0;
  try {
    if (free_.empty() && state_.size() >= max_sets_) throw std::bad_alloc();
    unit = arena_.allocate(units_of<Cluster>(content.size()));
  } catch (const std::bad_alloc&) {
    for (const Cluster& one : content) drop_if_unused(static_cast<std::uint32_t>(one.name));
    throw;
  }
  Id id = static_cast<Id>(state_.size());
  if (free_.empty()) {
    state_.emplace_back();
    store(headers_[id].version, 1U);
  } else {
    id = free_.back();
    free_.pop_back();
  }
  for (const Cluster& one : content) ++clusters_[static_cast<std::uint32_t>(one.name)].sets;
  // The version is odd from when the set was freed until its new content is whole.
  SetHeader& set = headers_[id];
  store(set.unit, unit);
  write(region_, unit, content);
  store(set.size, static_cast<std::uint32_t>(content.size()));
  store(set.version, set.version + 1);
  state_[id] = {0, signature};
  by_signature_.emplace(signature, id);
  return id;
}

void HolderSets::drop_if_unused(std::uint32_t number) {
  ClusterState& state = clusters_[number];
  if (state.sets != 0) return;
  forget(clusters_by_signature_, state.signature, number);
  const Cluster gone = cluster(number);
  arena_.free(gone.unit(), units_of<Holding>(gone.size()));
  free_clusters_.push_back(number);
}

void HolderSets::release(Id id) {
  if (id == kNobody) return;
  State& state = state_[id];
  if (--state.blocks != 0) return;
  forget(by_signature_, state.signature, id);
  SetHeader& set = headers_[id];
  store(set.version, set.version + 1);
  for (const Cluster& one : clusters(id)) {
    const auto number = static_cast<std::uint32_t>(one.name);
    --clusters_[number].sets;
    drop_if_unused(number);
  }
  arena_.free(set.unit, units_of<Cluster>(set.size));
  free_.push_back(id);
}

std::vector<Holding> HolderSets::holdings(Id id) const {
  std::vector<Holding> all;
  for (const Cluster& one : clusters(id)) {
    const auto content = holdings(one);
    all.insert(all.end(), content.begin(), content.end());
  }
  return all;
}

std::size_t HolderSets::memory_bytes() const {
  constexpr std::size_t kNodeBytes = 6 * sizeof(void*);  // of a map by signature, its bucket included
  return state_.size() * sizeof(SetHeader) + state_.capacity() * sizeof(State) + free_.capacity() * sizeof(Id) +
         clusters_.capacity() * sizeof(ClusterState) + free_clusters_.capacity() * sizeof(std::uint32_t) +
         memos_.size() * sizeof(Memo) + (by_signature_.size() + clusters_by_signature_.size()) * kNodeBytes +
         arena_.used_bytes();
}

bool HolderSets::consistent(std::span<const std::uint32_t> references) const {
  std::size_t live = 0;
  std::vector<std::uint32_t> had(clusters_.size());
  for (Id id = 1; id < state_.size(); ++id) {
    const State& state = state_[id];
    if (state.blocks != references[id] || (state.blocks != 0) == (headers_[id].version % 2 != 0)) return false;
    if (state.blocks == 0) continue;
    ++live;
    const auto content = clusters(id);
    if (content.empty() || !std::ranges::is_sorted(content, {}, &Cluster::range)) return false;
    for (const Cluster& one : content) ++had[static_cast<std::uint32_t>(one.name)];
    std::size_t equal = 0;
    for (auto [it, end] = by_signature_.equal_range(state.signature); it != end; ++it) {
      equal += same(clusters(it->second), content);
    }
    if (equal != 1) return false;
  }
  std::size_t live_clusters = 0;
  for (std::uint32_t number = 0; number < clusters_.size(); ++number) {
    const ClusterState& state = clusters_[number];
    if (state.sets != had[number]) return false;
    if (state.sets == 0) continue;
    ++live_clusters;
    const Cluster one = cluster(number);
    const auto content = holdings(one);
    const auto elsewhere = [&](const Holding& holding) { return Cluster::range_of(holding.slot) != one.range(); };
    if (content.empty() || std::ranges::any_of(content, elsewhere)) return false;
    if (!std::ranges::is_sorted(content, {}, &Holding::slot)) return false;
    std::size_t equal = 0;
    for (auto [it, end] = clusters_by_signature_.equal_range(state.signature); it != end; ++it) {
      equal += std::ranges::equal(holdings(cluster(it->second)), content);
    }
    if (equal != 1) return false;
  }
  return live == by_signature_.size() && live_clusters == clusters_by_signature_.size();
}

}  // namespace pointsman
