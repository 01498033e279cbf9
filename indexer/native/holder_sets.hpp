// SPDX-License-Identifier: Apache-2.0
// Who holds a block, as one of few shared values.
//
// Neighbouring blocks of a prompt are mostly held by the same slots on the same tiers, so each distinct set of
// holdings is kept once, counted, and a block only names it (4 bytes). A set never changes: a block whose holders
// change is given another one, found through a memo of recent changes (O(1) where blocks of one event follow each
// other) or by its content. Equal names mean equal sets, which is what makes a match fast.
//
// Where many hold a block, its neighbour is held by nearly the same. So a set is a list of clusters, one per 64 slots of
// which any is in it, and these are shared, counted and named too: a change makes one new cluster and a new list
// (O(64 + holders / 64)), and a reader that goes from one set to another looks only into clusters that differ.
//
// Headers and contents lie in the region, for readers; counts and ways to find a set are the writer's.
#pragma once

#include <cstdint>
#include <span>
#include <unordered_map>
#include <vector>

#include "arena.hpp"
#include "layout.hpp"
#include "mapping.hpp"

namespace pointsman {

// One count of a slot's holding moves by one.
struct Change {
  SlotId slot = kNoSlot;
  std::uint16_t kind = 0;
  std::int16_t step = 0;  // +1 or -1
  Tick until = 0;         // of a block that becomes demoting
  friend bool operator==(const Change&, const Change&) = default;
};

class HolderSets {
 public:
  using Id = std::uint32_t;
  static constexpr Id kNobody = 0;

  HolderSets(const Mapping& region, const Header& header, std::size_t holding_bytes);

  // In the order of the slots. Of the writer, for checks.
  [[nodiscard]] std::vector<Holding> holdings(Id id) const;
  // The set that `from` becomes, with a reference for the block that will name it.
  Id changed(Id from, const Change& change);
  // A block has ceased to name it.
  void release(Id id);

  void prepare(std::size_t sets) { arena_.prepare(sets * kPreparedBytes); }
  [[nodiscard]] std::size_t memory_bytes() const;
  // Whether `references[id]` blocks name each set, and each is kept once. O(sets).
  [[nodiscard]] bool consistent(std::span<const std::uint32_t> references) const;
  [[nodiscard]] std::size_t ids() const { return state_.size(); }

 private:
  struct State {
    std::uint32_t blocks = 0;  // that name it; 0: free
    std::uint64_t signature = 0;
  };
  // A cluster's name: how often its number was used before, and that number.
  struct ClusterState {
    std::uint32_t sets = 0;  // that have it; 0: free
    std::uint32_t uses = 0;
    std::uint64_t signature = 0;
    std::uint64_t place = 0;
  };
  using BySignature = std::unordered_multimap<std::uint64_t, std::uint32_t>;
  struct Memo {
    Id from = 0, to = 0;
    std::uint32_t from_version = 1, to_version = 1;  // odd: of nothing in use
    Change change;
  };
  static constexpr std::size_t kMemos = 2048;
  static constexpr std::size_t kPreparedBytes = 192;

  template <typename T>
  static std::size_t units_of(std::size_t size) {
    return (size * sizeof(T) + Arena::kUnitBytes - 1) / Arena::kUnitBytes;
  }
  [[nodiscard]] std::span<const Cluster> clusters(Id id) const {
    if (id == kNobody) return {};
    return {region_.at<Cluster>(headers_[id].unit * Arena::kUnitBytes), headers_[id].size};
  }
  [[nodiscard]] std::span<const Holding> holdings(const Cluster& cluster) const {
    return {region_.at<Holding>(cluster.unit() * Arena::kUnitBytes), cluster.size()};
  }
  [[nodiscard]] Cluster cluster(std::uint32_t number) const {
    return {clusters_[number].place, std::uint64_t{clusters_[number].uses} << 32 | number};
  }
  Cluster find_or_add(std::span<const Holding> content);
  Id find_or_add(std::span<const Cluster> content);
  void drop_if_unused(std::uint32_t cluster);

  const Mapping& region_;
  SetHeader* headers_;
  std::size_t max_sets_;
  Arena arena_;
  std::vector<State> state_;
  std::vector<Id> free_;
  BySignature by_signature_;
  std::vector<ClusterState> clusters_;
  std::vector<std::uint32_t> free_clusters_;
  BySignature clusters_by_signature_;
  std::vector<Memo> memos_;
  std::vector<Holding> scratch_;
  std::vector<Cluster> list_;
};

}  // namespace pointsman
