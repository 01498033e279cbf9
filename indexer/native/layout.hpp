// SPDX-License-Identifier: Apache-2.0
// The region that an index keeps its answers in. One process writes it; any number read it, without locks.
//
//   0        Header              what is where, the counters below, and whether another region took over
//   slots    uint32_t per slot ever opened: its place among the records; kNobodyHere once it is retired
//   records  SlotRecord          whose a live slot is, and what it holds in numbers; places are used again
//   shards   uint64_t per shard  where its table lies: units from the start (32 bits) | capacity class (8) | turn (24)
//   sets     SetHeader per set   where the set of holders lies; ids are used again
//   nodes    Group...            the shards' tables: request hash -> set of holders, and when it was last matched.
//                                Readers write that mark, nothing else; one that comes late marks another block
//   holdings Cluster..., Holding...  contents of the sets: of each 64 slots of which any is in it, who they are
//
// Every position is an offset from the start, so the region may lie anywhere. Each part has its full size from the
// beginning; only pages that were used take memory.
//
// Why a reader never sees what was not there, though the writer neither waits nor knows of it:
//   * A hash keeps its place in a shard's table for as long as that table is in use; only the set behind it changes,
//     in one store. A table that fills up is copied, and the copy put in its place by one store of the shard's word.
//     The word's turn differs then, so a reader that finds the word it began with has read a table in use.
//   * The number of shards grows and shrinks by one (linear hashing): a reader that finds nothing and another number
//     of shards than it began with looks again.
//   * A set's content never changes while anything names the set, and that of a cluster while a set has it. A set's
//     version is odd while nothing names it. A reader copies the content, then finds the block still naming the set
//     and the set still of the even version it began with: so the block had these holders at that moment. A cluster
//     has a name that no other content ever gets, so a reader that has it need not copy it again.
//   * A writer that dies at any point leaves all of this true: there is no lock to hold, and nothing half done that
//     a block names.
#pragma once

#include <array>
#include <cstdint>

#include "events.hpp"

namespace pointsman {

using SlotId = std::uint32_t;
inline constexpr SlotId kNoSlot = 0xffffffff;
inline constexpr std::uint32_t kNobodyHere = 0xffffffff;

constexpr std::size_t index_of(Tier tier) { return static_cast<std::size_t>(tier); }

// What a match tells apart: the tiers, and beside them doubtful RAM and what is on its way from HBM to RAM.
inline constexpr std::size_t kKinds = kTiers + 2;
inline constexpr std::size_t kDoubtfulRam = kTiers;
inline constexpr std::size_t kDemoting = kTiers + 1;

// Time as the region keeps it: sixteenths of a second of the caller's clock.
using Tick = std::uint32_t;
inline constexpr double kTicksPerSecond = 16;

// What one slot has of a block.
struct Holding {
  SlotId slot = kNoSlot;
  Tick until = 0;  // the latest end of a demoting block's grace
  // Identified blocks per kind: two groups of one block do not hide each other. Those in doubtful RAM count twice, as
  // RAM and as doubtful.
  std::array<std::uint8_t, 8> counts{};

  [[nodiscard]] bool empty() const { return (counts[0] | counts[1] | counts[2] | counts[kDemoting]) == 0; }
  // Bit per kind at `now`. RAM is doubtful when all of it is.
  [[nodiscard]] unsigned kinds(Tick now) const {
    const std::uint8_t ram = counts[index_of(Tier::ram)];
    const bool doubtful = ram != 0 && counts[kDoubtfulRam] >= ram;
    return (counts[0] != 0 ? 1U : 0U) | (ram != 0 && !doubtful ? 2U : 0U) | (counts[2] != 0 ? 4U : 0U) |
           (doubtful ? 1U << kDoubtfulRam : 0U) | (counts[kDemoting] != 0 && now < until ? 1U << kDemoting : 0U);
  }
  friend bool operator==(const Holding&, const Holding&) = default;
};
static_assert(sizeof(Holding) == 16);

// Slots [64 range, 64 range + 64) of a set, in the order of ranges.
struct Cluster {
  std::uint64_t place = 0;  // unit (32 bits) | holdings (8) | range (24)
  std::uint64_t name = 0;

  static constexpr std::size_t kSlots = 64;
  static constexpr std::uint32_t range_of(SlotId slot) {
    return slot / static_cast<std::uint32_t>(kSlots);
  }
  static constexpr std::uint64_t place_of(std::uint32_t unit, std::size_t size, std::uint32_t range) {
    return std::uint64_t{unit} | std::uint64_t{size} << 32 | std::uint64_t{range} << 40;
  }
  [[nodiscard]] std::uint32_t unit() const { return static_cast<std::uint32_t>(place); }
  [[nodiscard]] std::size_t size() const { return static_cast<std::size_t>(place >> 32 & 0xff); }
  [[nodiscard]] std::uint32_t range() const { return static_cast<std::uint32_t>(place >> 40); }
};
static_assert(sizeof(Cluster) == 16);

struct SetHeader {
  std::uint32_t version;  // even: in use
  std::uint32_t size;     // clusters
  std::uint32_t unit;
  std::uint32_t unused;
};

// A cache line of a shard's table. Places fill from the first on and are never emptied.
struct alignas(64) Group {
  static constexpr std::size_t kPlaces = 5;
  std::array<std::uint64_t, kPlaces> hashes;  // 0: empty
  std::array<std::uint32_t, kPlaces> sets;    // 0: nobody holds it any more
  std::uint32_t marks;  // kMarkBits per place: the generation in which it was last stored or matched
  static constexpr unsigned kMarkBits = 6;

  static constexpr std::uint32_t mark_at(std::uint32_t marks, std::size_t place) {
    return marks >> (place * kMarkBits) & kLastMark;
  }
  static constexpr std::uint32_t with_mark(std::uint32_t marks, std::size_t place, std::uint32_t mark) {
    return (marks & ~(kLastMark << (place * kMarkBits))) | mark << (place * kMarkBits);
  }
  static constexpr std::uint32_t kLastMark = (1U << kMarkBits) - 1;  // marks are 1 to this; 0: never
};
static_assert(sizeof(Group) == 64 && Group::kPlaces * Group::kMarkBits <= 32);

struct SlotRecord {
  static constexpr std::size_t kNameWords = 40;
  std::uint32_t version;  // odd while the record changes hands
  SlotId slot;
  std::uint32_t flags;
  std::uint32_t block_size;
  std::array<std::uint64_t, 8> counts;  // in the order of SlotCounts
  std::uint64_t name_bytes;
  std::array<std::uint64_t, kNameWords> name;
};
inline constexpr std::uint32_t kSuspect = 1;  // left out of answers

struct Header {
  static constexpr std::uint64_t kMagic = 0x78646e69'6d746e70;  // "pntmindx"
  static constexpr std::uint32_t kLayout = 2;

  std::uint64_t magic;
  std::uint32_t layout;
  std::uint32_t superseded;  // 1: another region stands at the path
  std::uint64_t bytes;
  std::uint64_t key_id;  // of the hash key, so that nobody asks with another
  std::uint64_t slots, records, shards, sets, nodes, holdings;  // offsets
  std::uint64_t max_slots, max_records, max_shards, max_sets;
  alignas(64) std::uint64_t version;  // grows with every batch that changed something
  std::uint32_t shard_count;
  std::uint32_t record_count;  // places ever used
  std::uint32_t touching;      // 0: nobody marks what it matches; else the running generation
  std::uint32_t slot_count;    // slots ever opened
  std::uint64_t blocks;    // (slot, block) pairs
  std::uint64_t distinct;  // blocks that anybody holds
  std::uint64_t memory_bytes;
};

inline constexpr std::size_t kFirstClassGroups = 1;
inline constexpr std::size_t kClasses = 80;
// Capacities grow by a quarter, so a table is always between 70 and 88 % full when it just keeps growing.
constexpr std::array<std::uint32_t, kClasses> capacity_classes() {
  std::array<std::uint32_t, kClasses> groups{};
  std::uint32_t size = kFirstClassGroups;
  for (std::uint32_t& one : groups) {
    one = size;
    size += size / 4 > 1 ? size / 4 : 1;
  }
  return groups;
}
inline constexpr std::array<std::uint32_t, kClasses> kCapacityGroups = capacity_classes();

// Linear hashing: `shards` is not a power of two in general, and the last of them split off first.
constexpr std::uint32_t shard_of(std::uint64_t hash, std::uint32_t shards) {
  const std::uint32_t mask = 0xffffffffU >> __builtin_clz(shards);
  const auto index = static_cast<std::uint32_t>(hash) & mask;
  return index < shards ? index : index & mask >> 1;
}
static_assert(shard_of(7, 5) == 3 && shard_of(4, 5) == 4 && shard_of(9, 1) == 0);

struct ShardWord {
  std::uint64_t value = 0;
  [[nodiscard]] std::uint32_t unit() const { return static_cast<std::uint32_t>(value); }
  [[nodiscard]] std::size_t size_class() const { return static_cast<std::size_t>(value >> 32 & 0xff); }
  [[nodiscard]] std::uint32_t groups() const { return unit() == 0 ? 0 : kCapacityGroups[size_class()]; }
  [[nodiscard]] ShardWord next(std::uint32_t at, std::size_t its_class) const {
    return {std::uint64_t{at} | std::uint64_t{its_class} << 32 | ((value >> 40) + 1) << 40};
  }
};

// The group that a hash comes to first. Other bits choose the shard.
constexpr std::uint32_t home_of(std::uint64_t hash, std::uint32_t groups) {
  return static_cast<std::uint32_t>((hash >> 32) * groups >> 32);
}

}  // namespace pointsman
