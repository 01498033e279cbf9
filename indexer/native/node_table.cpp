// SPDX-License-Identifier: Apache-2.0
#include "node_table.hpp"

#include <algorithm>
#include <new>

#include "touch.hpp"

namespace pointsman {
namespace {

// Places that may be used: one in a table stays empty at least, so that a search ends.
constexpr std::size_t most_used(std::size_t groups) { return groups * 22 / 5; }   // 88 %
constexpr std::size_t room_after_growth(std::size_t groups) { return groups * 7 / 2; }  // 70 %

}  // namespace

NodeTable::NodeTable(const Mapping& region, Header& header, std::size_t node_bytes)
    : region_(region),
      header_(header),
      words_(region.at<std::uint64_t>(header.shards)),
      arena_(region, header.nodes, node_bytes),
      state_(1) {
  store(header_.shard_count, shards_);
}

NodeTable::Place NodeTable::find(std::uint64_t hash) const {
  const std::uint32_t shard = shard_of(hash, shards_);
  const ShardWord word = word_of(shard);
  const std::uint32_t groups = word.groups();
  if (groups == 0) return {};
  for (std::uint32_t g = home_of(hash, groups);; g = g + 1 == groups ? 0 : g + 1) {
    Group& one = *group(word, g);
    for (std::size_t i = 0; i < Group::kPlaces; ++i) {
      if (one.hashes[i] == hash) return place_in(one, i, shard);
      if (one.hashes[i] == 0) return {};
    }
  }
}

NodeTable::Place NodeTable::place(std::uint64_t hash) {
  if (live_ >= shards_ * kShardBlocks && shards_ < header_.max_shards) split();
  const std::uint32_t shard = shard_of(hash, shards_);
  for (;;) {
    const ShardWord word = word_of(shard);
    const std::uint32_t groups = word.groups();
    const bool full = state_[shard].used >= most_used(groups);
    for (std::uint32_t g = groups == 0 ? 0 : home_of(hash, groups); groups != 0; g = g + 1 == groups ? 0 : g + 1) {
      Group& one = *group(word, g);
      std::size_t i = 0;
      while (i < Group::kPlaces && one.hashes[i] != 0 && one.hashes[i] != hash) ++i;
      if (i == Group::kPlaces) continue;
      if (one.hashes[i] == hash) return place_in(one, i, shard);
      if (full) break;
      store(one.hashes[i], hash);
      ++state_[shard].used;
      return place_in(one, i, shard);
    }
    rebuild(shard, state_[shard].live + 1);
  }
}

// Where a group is full, a search goes on in the next: one in two does when a table is about to grow, and it takes two
// groups on average.
void NodeTable::touch(std::span<const std::uint64_t> hashes) const {
  std::uint64_t sum = 0;
  for (const std::uint64_t hash : hashes) {
    const ShardWord word = word_of(shard_of(hash, shards_));
    const std::uint32_t groups = word.groups();
    if (groups < 3) continue;
    const Group* home = group(word, std::min(home_of(hash, groups), groups - 3));
    sum += home[0].hashes[0] + home[1].hashes[0] + home[2].hashes[0];
  }
  keep_loads(sum);
}

void NodeTable::assign(const Place& place, SetId set) {
  const int change = (set != 0) - (*place.set != 0);
  store(*place.set, set);
  live_ += change;
  state_[place.shard].live += change;
}

void NodeTable::settle(std::uint32_t shard) {
  if (shard < shards_) {
    const std::size_t groups = word_of(shard).groups();
    const std::size_t live = state_[shard].live;
    if (live == 0 ? groups > 0 : groups > 2 && live < groups) rebuild(shard, live);
  }
  if (shards_ > 1 && live_ < (shards_ - 1) * kShardBlocks / 2) merge();
}

NodeTable::Filling NodeTable::make_table(ShardWord before, std::size_t blocks) {
  if (blocks == 0) return {before.next(0, 0), {}};
  const auto* fitting = std::ranges::lower_bound(kCapacityGroups, blocks, {}, room_after_growth);
  if (fitting == kCapacityGroups.end()) throw std::bad_alloc();
  Filling table{{}, std::vector<std::uint8_t>(*fitting)};
  table.word = before.next(arena_.allocate(*fitting), static_cast<std::size_t>(fitting - kCapacityGroups.begin()));
  for (std::uint32_t g = 0; g < table.word.groups(); ++g) {
    Group& one = *group(table.word, g);
    // Somebody may still be reading what this memory was before.
    for (std::uint64_t& hash : one.hashes) store(hash, std::uint64_t{0});
    for (SetId& set : one.sets) store(set, SetId{0});
    store(one.marks, 0U);
  }
  return table;
}

// Nobody reads it yet. Filled groups are counted aside, for the next free place is found by no look at the group.
void NodeTable::copy_into(Filling& table, const Group& from, std::size_t place) const {
  const std::uint64_t hash = from.hashes[place];
  const std::uint32_t mark = Group::mark_at(load(from.marks, std::memory_order_relaxed), place);
  const std::uint32_t groups = table.word.groups();
  std::uint32_t g = home_of(hash, groups);
  while (table.filled[g] == Group::kPlaces) g = g + 1 == groups ? 0 : g + 1;
  Group& one = *group(table.word, g);
  const std::size_t i = table.filled[g]++;
  store(one.sets[i], from.sets[place]);
  if (mark != 0) store(one.marks, Group::with_mark(load(one.marks, std::memory_order_relaxed), i, mark));
  store(one.hashes[i], hash);
}

void NodeTable::put(std::uint32_t shard, ShardWord table) { store(words_[shard], table.value); }

void NodeTable::discard(ShardWord table) {
  if (table.groups() != 0) arena_.free(table.unit(), table.groups());
}

void NodeTable::rebuild(std::uint32_t shard, std::size_t blocks) {
  const ShardWord old = word_of(shard);
  Filling table = make_table(old, blocks);
  each_of(old, [&](const Group& group, std::size_t i) { copy_into(table, group, i); });
  put(shard, table.word);
  state_[shard].used = state_[shard].live;
  discard(old);
}

// The new last shard takes its hashes from the one that it has in common all bits but the highest with.
void NodeTable::split() {
  const std::uint32_t fresh = shards_;
  const std::uint32_t parent = shard_of(fresh, shards_);
  const ShardWord old = word_of(parent);
  std::uint32_t leaving = 0;
  each_of(old, [&](const Group& group, std::size_t i) { leaving += shard_of(group.hashes[i], shards_ + 1) == fresh; });
  const std::uint32_t staying = state_[parent].live - leaving;
  Filling moved = make_table(word_of(fresh), leaving);
  Filling kept;
  try {
    kept = make_table(old, staying);
  } catch (const std::bad_alloc&) {
    discard(moved.word);
    throw;
  }
  each_of(old, [&](const Group& group, std::size_t i) {
    copy_into(shard_of(group.hashes[i], shards_ + 1) == fresh ? moved : kept, group, i);
  });
  state_.resize(shards_ + 1);
  state_[fresh] = {leaving, leaving};
  state_[parent] = {staying, staying};
  put(fresh, moved.word);
  store(header_.shard_count, ++shards_);
  put(parent, kept.word);
  discard(old);
}

void NodeTable::merge() {
  const std::uint32_t last = shards_ - 1;
  const std::uint32_t parent = shard_of(last, last);
  const ShardWord from = word_of(last), into = word_of(parent);
  const std::uint32_t blocks = state_[parent].live + state_[last].live;
  Filling table = make_table(into, blocks);
  for (const ShardWord one : {into, from}) {
    each_of(one, [&](const Group& group, std::size_t i) { copy_into(table, group, i); });
  }
  state_[parent] = {blocks, blocks};
  state_.pop_back();
  put(parent, table.word);
  store(header_.shard_count, --shards_);
  put(last, from.next(0, 0));
  discard(into);
  discard(from);
}

const char* NodeTable::check() const {
  std::size_t all = 0;
  for (std::uint32_t shard = 0; shard < shards_; ++shard) {
    const ShardWord word = word_of(shard);
    std::size_t used = 0, live = 0;
    for (std::uint32_t g = 0; g < word.groups(); ++g) {
      for (std::size_t i = 0; i < Group::kPlaces; ++i) {
        const Group& one = *group(word, g);
        if (one.hashes[i] == 0) continue;
        ++used;
        live += one.sets[i] != 0;
        if (find(one.hashes[i]).set != &one.sets[i]) return "a block is not where it is looked for";
      }
    }
    if (used != state_[shard].used || live != state_[shard].live) return "a shard is miscounted";
    if (used > most_used(word.groups())) return "a shard is overfull";
    all += live;
  }
  return all == live_ ? "" : "the table is miscounted";
}

}  // namespace pointsman
