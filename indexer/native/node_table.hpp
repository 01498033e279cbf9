// SPDX-License-Identifier: Apache-2.0
// Request hash -> set of holders: the table of layout.hpp, as its writer keeps it.
//
// Many small tables (shards) with linear probing by cache line. No operation touches more than two shards, so nothing
// waits for the whole table to grow.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "arena.hpp"
#include "atomics.hpp"
#include "layout.hpp"
#include "mapping.hpp"

namespace pointsman {

class NodeTable {
 public:
  using SetId = std::uint32_t;

  // Where a hash is; good until the next call of place().
  struct Place {
    SetId* set = nullptr;
    std::uint32_t* marks = nullptr;
    std::uint32_t place = 0;  // of the group
    std::uint32_t shard = 0;

    [[nodiscard]] std::uint32_t mark() const { return Group::mark_at(load(*marks, std::memory_order_relaxed), place); }
    void touch(std::uint32_t mark) const {
      store(*marks, Group::with_mark(load(*marks, std::memory_order_relaxed), place, mark), std::memory_order_relaxed);
    }
  };

  NodeTable(const Mapping& region, Header& header, std::size_t node_bytes);

  // The place of a hash, made if there is none: with the set 0, which readers pass over.
  Place place(std::uint64_t hash);
  [[nodiscard]] Place find(std::uint64_t hash) const;  // its set is null: there is none
  void assign(const Place& place, SetId set);
  // Frees what assign(…, 0) left. To be called when no Place is in use.
  void settle(std::uint32_t shard);

  // Loads what place() will look at for these hashes.
  void touch(std::span<const std::uint64_t> hashes) const;
  [[nodiscard]] std::size_t size() const { return live_; }
  [[nodiscard]] std::size_t memory_bytes() const { return arena_.used_bytes() + shards_ * sizeof(std::uint64_t); }
  void prepare(std::size_t blocks) { arena_.prepare(blocks * kPreparedBytes + kPreparedBase); }

  // visit(hash, set) for every block that somebody holds.
  template <typename Visit>
  void for_each(Visit&& visit) const {
    for (std::uint32_t shard = 0; shard < shards_; ++shard) {
      each_of(word_of(shard), [&](const Group& group, std::size_t i) { visit(group.hashes[i], group.sets[i]); });
    }
  }
  // What is wrong with the table itself, or an empty string.
  [[nodiscard]] const char* check() const;

 private:
  static constexpr std::size_t kShardBlocks = 384;  // live blocks of a shard on average
  static constexpr std::size_t kPreparedBytes = 48, kPreparedBase = 256 * 1024;
  struct Shard {
    std::uint32_t used = 0;  // places with a hash
    std::uint32_t live = 0;  // of them with holders
  };

  [[nodiscard]] ShardWord word_of(std::uint32_t shard) const { return {words_[shard]}; }
  [[nodiscard]] Group* group(ShardWord word, std::uint32_t index) const {
    return region_.at<Group>(word.unit() * Arena::kUnitBytes) + index;
  }
  template <typename Visit>
  void each_of(ShardWord word, Visit&& visit) const {
    for (std::uint32_t g = 0; g < word.groups(); ++g) {
      const Group& one = *group(word, g);
      for (std::size_t i = 0; i < Group::kPlaces && one.hashes[i] != 0; ++i) {
        if (one.sets[i] != 0) visit(one, i);
      }
    }
  }
  static Place place_in(Group& group, std::size_t place, std::uint32_t shard) {
    return {&group.sets[place], &group.marks, static_cast<std::uint32_t>(place), shard};
  }
  // A table that is not in use yet.
  struct Filling {
    ShardWord word;
    std::vector<std::uint8_t> filled;  // places, by group
  };
  // An empty one with room for `blocks`.
  Filling make_table(ShardWord before, std::size_t blocks);
  void copy_into(Filling& table, const Group& from, std::size_t place) const;
  void put(std::uint32_t shard, ShardWord table);
  void discard(ShardWord table);
  void rebuild(std::uint32_t shard, std::size_t blocks);
  void split();
  void merge();

  const Mapping& region_;
  Header& header_;
  std::uint64_t* words_;
  Arena arena_;
  std::uint32_t shards_ = 1;
  std::size_t live_ = 0;
  std::vector<Shard> state_;
};

}  // namespace pointsman
