// SPDX-License-Identifier: Apache-2.0
// Which block of which prompt lies where.
//
// Two kinds of block identity:
//   engine key      what the engine calls a block; meaningful only within one slot (EngineKey, with its group)
//   request hash    ours: a keyed chain over (namespace; per block: token ids, extra keys), the same for an
//                   event and for a request (HashChain)
//
// A *slot* is one holder (a rank of one incarnation of a worker) or one store. Slot numbers are never reused,
// so retiring a slot hides all its blocks at once (O(1)); the memory is swept a little at each later apply.
//
//   slots_[s].blocks : engine key   -> Block{request hash, references per tier}      identity and counting
//   holders_         : request hash -> set of Holding{slot, tiers present}           what queries read
//
// Invariant (check()): a slot alive appears in holders_[h] on tier t exactly when one of its identified blocks
// with request hash h has references on t. Sets are shared (holder_sets.hpp).
//
// Identity comes from events on the GPU, which carry their own extra keys. A lower-tier event resolves by
// engine key within its slot; with `plain` (no salt, no images, no adapters) its own tokens may identify it.
// What cannot be identified yet waits, bounded: a block without identity in `blocks`, a stored event whose
// parent is unknown in `detached`. A block whose references fell to zero keeps its identity for a while,
// because engines publish the removal from HBM before the store to RAM.
//
// One writer or many readers at a time (std::shared_mutex inside); no call blocks on I/O.
#pragma once

#include <array>
#include <cstdint>
#include <deque>
#include <list>
#include <memory>
#include <shared_mutex>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "events.hpp"
#include "flat_map.hpp"
#include "holder_sets.hpp"
#include "siphash.hpp"

namespace pointsman {

inline constexpr std::uint16_t kMaxReferences = 0xffff;  // counts stay there rather than wrap

// request hash of block i = SipHash(key; hash of block i-1, tokens, extra keys); block -1 is the namespace.
class HashChain {
 public:
  explicit HashChain(HashKey key) : key_(key) {}
  [[nodiscard]] std::uint64_t root(std::string_view model, std::string_view lora) const;
  [[nodiscard]] std::uint64_t next(std::uint64_t parent, std::span<const std::uint32_t> tokens,
                                   std::span<const std::uint8_t> extra) const;
  // Appends the hashes of the full blocks of a prompt; `first_extra` are the extra keys of its first block.
  void blocks(std::uint64_t root, std::span<const std::uint32_t> tokens, std::size_t block_size,
              std::span<const std::uint8_t> first_extra, std::vector<std::uint64_t>& hashes) const;

 private:
  HashKey key_;
};

struct Limits {
  std::size_t detached_blocks = 65'536;    // per slot: blocks of stored events whose parent is unknown
  std::size_t unidentified_blocks = 65'536;  // per slot: lower-tier blocks that no GPU event has named yet
  std::size_t remembered_blocks = 65'536;  // per slot: identities kept after the last reference went
};

// What one batch did. Counts of blocks unless named otherwise.
struct ApplyCounts {
  std::uint64_t stored = 0;
  std::uint64_t removed = 0;
  std::uint64_t clears = 0;              // events
  std::uint64_t detached = 0;            // stored under an unknown parent
  std::uint64_t joined = 0;              // detached blocks whose parent arrived
  std::uint64_t unidentified = 0;        // lower-tier blocks not named by a GPU event yet
  std::uint64_t unknown_removals = 0;    // nothing was there
  std::uint64_t dropped_waiting = 0;     // detached or unidentified blocks given up for the bound
  std::uint64_t conflicts = 0;           // an engine key stored again with another content
  std::uint64_t malformed_events = 0;
  std::uint64_t unknown_events = 0;      // event types we do not know
  std::uint64_t unknown_medium_events = 0;
  std::uint64_t sparse_events = 0;       // groups whose cache is not a plain prefix
  bool malformed_batch = false;          // not a whole batch: nothing of it was applied
};

struct SlotCounts {
  std::array<std::uint64_t, kTiers> blocks{};  // identified, with references, per tier
  std::uint64_t doubtful_ram = 0;
  std::uint64_t unidentified = 0;
  std::uint64_t detached = 0;
  std::uint64_t remembered = 0;
  std::uint32_t block_size = 0;  // of the newest stored event; 0: none yet
};

// Blocks [start, end) of a query, all held by `slot` on `tier`. Doubtful: RAM of a rank that cleared its cache.
struct Run {
  SlotId slot;
  std::uint8_t tier;
  bool doubtful;
  std::uint32_t start;
  std::uint32_t end;
};

class PrefixIndex {
 public:
  PrefixIndex(HashKey key, Limits limits) : chain_(key), key_(key), limits_(limits) {}

  // A new holder. `plain`: lower-tier events of this worker may identify blocks by their own tokens.
  SlotId open(std::string_view model, bool plain);
  void retire(SlotId slot);
  [[nodiscard]] bool alive(SlotId slot) const;

  // Applies a batch. `ranks[r]` is the slot of rank r; a batch without a rank, or with one beyond them, is of
  // `default_rank`. Storage events go to `store`.
  ApplyCounts apply(std::span<const SlotId> ranks, std::uint32_t default_rank, SlotId store,
                    const std::uint8_t* data, std::size_t size);

  // Appends the runs of every slot alive, up to the first block that nobody holds; those of one slot and kind in
  // order. O(blocks + sum of holders where they change from one block to the next).
  void match(std::span<const std::uint64_t> hashes, std::vector<Run>& runs) const;

  void clear(SlotId slot);  // as the engine's clear-all does
  [[nodiscard]] SlotCounts counts(SlotId slot) const;
  // (request hash, bit per tier, bit 3: doubtful) of every identified block with references.
  [[nodiscard]] std::vector<std::pair<std::uint64_t, std::uint8_t>> blocks(SlotId slot) const;
  // Sweeps up to `steps` map positions of retired slots; true when nothing is left to sweep.
  bool sweep(std::size_t steps);
  [[nodiscard]] std::uint64_t version() const;
  [[nodiscard]] std::size_t distinct_blocks() const;
  [[nodiscard]] std::size_t memory_bytes() const;
  // The first broken invariant, or an empty string. O(everything).
  [[nodiscard]] std::string check() const;

  [[nodiscard]] const HashChain& chain() const { return chain_; }

 private:
  struct Block {
    std::uint64_t request_hash = 0;
    std::array<std::uint16_t, kTiers> references{};
    bool identified = false;
    bool doubtful_ram = false;
    [[nodiscard]] bool held() const { return (references[0] | references[1] | references[2]) != 0; }
  };
  struct HashEngineKey {
    std::size_t operator()(const EngineKey& key) const noexcept { return mix64(key.lo ^ (key.hi * 0x9e3779b97f4a7c15ULL)); }
  };
  struct HashRequest {
    std::size_t operator()(std::uint64_t hash) const noexcept { return hash; }  // already a PRF's output
  };
  struct Detached {
    EngineKey parent;
    std::vector<EngineKey> hashes;
    std::vector<std::uint32_t> tokens;
    std::vector<std::uint8_t> extra_bytes;
    std::vector<std::uint32_t> extra_ends;
    std::uint32_t block_size;
  };
  using Blocks = FlatMap<EngineKey, Block, HashEngineKey>;
  struct Slot {
    bool alive = true;
    bool plain = false;
    std::string model;
    std::uint32_t block_size = 0;
    Blocks blocks;
    std::unordered_map<std::string, std::uint64_t> roots;  // by adapter
    std::list<Detached> detached;  // oldest first
    std::unordered_multimap<std::size_t, std::list<Detached>::iterator> waiting;  // by the parent key's hash
    std::size_t detached_blocks = 0;
    std::deque<EngineKey> unidentified_order;
    std::deque<EngineKey> remembered_order;
    std::size_t sweep_position = 0;
  };

  using Identified = std::vector<std::pair<EngineKey, std::uint64_t>>;
  // What every step of one batch needs: whose events, where its storage goes, what to count.
  struct Target {
    Slot& slot;
    SlotId id;
    SlotId store;
    ApplyCounts& counts;
  };

  void apply_stored(const Target& target, const Event& event);
  void apply_removed(const Target& target, const Event& event);
  void remove_from_store(const Target& target, const EngineKey& key);
  void clear_locked(Slot& slot, SlotId id);
  // Chains the blocks of a stored event from `parent` and identifies each.
  Identified chain_blocks(const Target& target, std::uint64_t parent, std::span<const EngineKey> keys,
                          std::span<const std::uint32_t> tokens, std::uint32_t block_size,
                          std::span<const std::uint8_t> extra_bytes, std::span<const std::uint32_t> extra_ends);
  void identify(const Target& target, const EngineKey& key, std::uint64_t request_hash);
  void join_detached(const Target& target, Identified arrived);
  void reference(const Target& target, const EngineKey& key, Tier tier, bool waits);
  void store_reference(SlotId store, const EngineKey& key, std::uint64_t request_hash);
  void detach(const Target& target, const Event& event);
  void bound_waiting(const Target& target);
  void drop_oldest_detached(const Target& target);
  void remember(Slot& slot, const EngineKey& key);
  [[nodiscard]] std::uint64_t root_of(Slot& slot, const Event& event) const;
  void publish(std::uint64_t request_hash, SlotId id, Tier tier, int step);
  void publish_doubt(std::uint64_t request_hash, SlotId id, int step);
  void unpublish_all(SlotId id, Block& block);
  Slot* find_slot(SlotId id);
  [[nodiscard]] const Slot* find_slot(SlotId id) const;
  bool sweep_locked(std::size_t steps);

  HashChain chain_;
  HashKey key_;
  Limits limits_;
  FlatMap<std::uint64_t, HolderSets::Id, HashRequest> holders_;
  HolderSets sets_;
  std::vector<std::unique_ptr<Slot>> slots_;  // by slot number; null once swept
  std::vector<std::int32_t> dense_;  // slot number -> small number of a live slot, or -1
  std::vector<std::int32_t> free_dense_;
  std::int32_t dense_count_ = 0;
  std::deque<SlotId> retired_;
  std::uint64_t version_ = 0;
  Event scratch_;
  mutable std::shared_mutex mutex_;
};

}  // namespace pointsman
