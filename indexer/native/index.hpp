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
//   Slot::blocks : engine key   -> Block{request hash, references per tier}      identity and counting; private
//   nodes_       : request hash -> set of Holding{slot, tiers present}           what queries read; in the region
//
// Invariant (check()): a slot alive appears in the set of h on tier t exactly when one of its identified blocks
// with request hash h has references on t. Sets are shared (holder_sets.hpp).
//
// Identity comes from events on the GPU, which carry their own extra keys. A lower-tier event resolves by
// engine key within its slot; with `plain` (no salt, no images, no adapters) its own tokens may identify it.
// What cannot be identified yet waits, bounded: a block without identity in `blocks`, a stored event whose
// parent is unknown in `detached`. A block whose references fell to zero keeps its identity for a while,
// because engines publish the removal from HBM before the store to RAM. Where a slot's engine is known to offload, such
// a block is *demoting* for a grace and stays in answers as that: until the store to RAM, the grace's end or a clear.
//
// One writer at a time (a mutex inside). Matches take no lock and may run in other processes (layout.hpp, view.hpp);
// other questions wait for the writer. No call blocks on I/O.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <deque>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "block_table.hpp"
#include "events.hpp"
#include "hash_chain.hpp"
#include "holder_sets.hpp"
#include "node_table.hpp"
#include "segment.hpp"
#include "view.hpp"

namespace pointsman {

struct Limits {
  std::size_t detached_blocks = 65'536;    // per slot: blocks of stored events whose parent is unknown
  std::size_t unidentified_blocks = 65'536;  // per slot: lower-tier blocks that no GPU event has named yet
  std::size_t remembered_blocks = 65'536;  // per slot: identities kept after the last reference went
  // Of all slots together, a block once per slot. Beyond it those go that were matched longest ago.
  std::size_t blocks = std::size_t{1} << 27;
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
  std::uint64_t evicted = 0;             // given up for the bound of the whole index
  bool malformed_batch = false;          // not a whole batch: nothing of it was applied
};

class PrefixIndex {
 public:
  // In private memory where `path` is empty; else in a file that readers find at `path` after publish().
  PrefixIndex(HashKey key, Limits limits, const std::string& path = {});

  // A new holder, whose name readers see. `plain`: lower-tier events of this worker may identify blocks by their own
  // tokens. `grace_s`: how long a block that left HBM may take to appear in RAM; 0: nothing is offloaded.
  SlotId open(std::string_view model, bool plain, std::string_view name = {}, double grace_s = 0);
  void retire(SlotId slot);
  [[nodiscard]] bool alive(SlotId slot) const { return view_.alive(slot); }
  // Tells readers to leave a slot out of answers, or no longer.
  void suspect(SlotId slot, bool on);
  // From now on readers find this index at its path, and those of the one before it move here.
  void publish();

  // Applies a batch. `ranks[r]` is the slot of rank r; a batch without a rank, or with one beyond them, is of
  // `default_rank`. Storage events go to `store`. `now_s` is the caller's clock, which never goes back.
  ApplyCounts apply(std::span<const SlotId> ranks, std::uint32_t default_rank, SlotId store,
                    const std::uint8_t* data, std::size_t size, double now_s = 0);

  // See IndexView::match. Waits for nobody: where a grace is over it says so to the index only if no one is writing.
  void match(std::span<const std::uint64_t> hashes, std::vector<Run>& runs, double now_s);
  // The same without a clock: graces are over when the next batch or sweep says so.
  void match(std::span<const std::uint64_t> hashes, std::vector<Run>& runs) const { view_.match(hashes, runs, 0); }

  // Everything the slot keeps by engine key, and a live, empty slot from that (export.cpp). Import throws
  // std::invalid_argument for bytes that are no export; it returns how many blocks were taken.
  static constexpr std::size_t kRecordBytes = 20;
  [[nodiscard]] std::vector<std::uint8_t> export_slot(SlotId slot) const;
  std::size_t import_slot(SlotId slot, std::span<const std::uint8_t> records, std::uint32_t block_size);

  void clear(SlotId slot);  // as the engine's clear-all does
  [[nodiscard]] SlotCounts counts(SlotId slot) const;
  // (request hash, bit per tier, bit 3: doubtful, bit 4: demoting) of every identified block with references or demoting.
  [[nodiscard]] std::vector<std::pair<std::uint64_t, std::uint8_t>> blocks(SlotId slot) const;
  // Sweeps up to `steps` cells of retired slots; true when nothing is left to sweep.
  bool sweep(std::size_t steps, double now_s = 0);
  [[nodiscard]] std::uint64_t version() const;
  [[nodiscard]] std::size_t distinct_blocks() const;
  [[nodiscard]] std::size_t memory_bytes() const;
  // The first broken invariant, or an empty string. O(everything).
  [[nodiscard]] std::string check() const;

  [[nodiscard]] const HashChain& chain() const { return chain_; }

 private:
  struct Detached {
    EngineKey parent;
    std::vector<EngineKey> keys;
    std::vector<std::uint32_t> tokens;
    std::vector<std::uint8_t> extra_bytes;
    std::vector<std::uint32_t> extra_ends;
    std::uint32_t block_size;
  };
  // What waits for an event to come, of a slot where anything does.
  struct Waiting {
    std::list<Detached> detached;  // oldest first
    std::multimap<EngineKey, std::list<Detached>::iterator> by_parent;  // those of one parent: oldest first
    std::size_t detached_blocks = 0;
    std::deque<EngineKey> unidentified_order;
    std::deque<EngineKey> remembered_order;
  };
  struct Slot {
    bool alive = true;
    bool plain = false;
    Tick grace = 0;
    std::string model;
    std::uint32_t block_size = 0;
    BlockTable blocks;
    std::size_t blocks_counted = 0;  // of them in total_blocks_
    SlotCounts totals;
    Waiting waiting;
    std::unordered_map<std::string, std::uint64_t> roots;  // by adapter
    std::size_t sweep_position = 0;
  };

  using Identified = std::vector<std::pair<EngineKey, std::uint64_t>>;
  // What every step of one batch needs: whose events, where its storage goes, what to count.
  struct Target {
    Slot& slot;
    SlotId id;
    SlotId store;
    ApplyCounts& counts;
    Tick now = 0;
  };
  // Blocks of a stored event, or of one that waited.
  struct Chained {
    std::span<const EngineKey> keys;
    std::span<const std::uint32_t> tokens;
    std::uint32_t block_size;
    std::span<const std::uint8_t> extra_bytes;
    std::span<const std::uint32_t> extra_ends;
  };

  void apply_event(const Target& target, const Event& event);
  void apply_stored(const Target& target, const Event& event);
  void apply_removed(const Target& target, const Event& event);
  void remove_from_store(const Target& target, EngineKey key);
  void clear_locked(Slot& slot, SlotId id);
  // Request hashes of a chain of blocks, into chain_hashes_; asks for the memory where they will go.
  void hash_chain(std::uint64_t parent, const Chained& blocks);
  // A stored event whose parent is known: references and identity at once.
  void store_chain(const Target& target, std::uint64_t parent, const Chained& blocks, Tier tier);
  void identify(const Target& target, EngineKey key, std::uint64_t request_hash);
  void join_detached(const Target& target, Identified arrived);
  void reference(const Target& target, EngineKey key, Tier tier, bool waits);
  void store_reference(SlotId store, EngineKey key, std::uint64_t request_hash);
  void detach(const Target& target, const Event& event);
  void bound_waiting(const Target& target);
  void drop_oldest_detached(const Target& target);
  void remember(Slot& slot, EngineKey key);
  [[nodiscard]] std::uint64_t root_of(Slot& slot, const Event& event) const;

  // Every change of a block is between a count of -1 before it and of +1 after it.
  static void count(Slot& slot, const Block& block, int step);
  void move_holding(std::uint64_t request_hash, SlotId id, std::size_t kind, int step, Tick until = 0);
  // The block's last reference in HBM goes, and it begins to be demoting.
  void demote(const Target& target, Block& block);
  void expire(Tick now);
  // See evict.cpp.
  void next_age(std::uint64_t stored);
  std::size_t evict();
  bool evict_cell(SlotId id, Slot& slot, unsigned least_age);
  [[nodiscard]] unsigned oldest_share() const;
  void unpublish_all(SlotId id, const Block& block);
  void show_counts(SlotId id, Slot& slot);
  void changed();
  Slot* find_slot(SlotId id) { return id < slots_.size() ? slots_[id].get() : nullptr; }
  [[nodiscard]] Slot* find_slot(SlotId id) const { return id < slots_.size() ? slots_[id].get() : nullptr; }
  bool sweep_locked(std::size_t steps);
  void check_slot(SlotId id, Slot& slot, std::size_t& expected, std::string& problem) const;

  HashChain chain_;
  Limits limits_;
  Segment segment_;
  Header& header_;
  IndexView view_;
  NodeTable nodes_;
  HolderSets sets_;
  std::vector<std::unique_ptr<Slot>> slots_;  // by slot number; null once swept
  std::deque<SlotId> retired_;
  std::size_t total_blocks_ = 0;
  std::uint32_t mark_ = 0;  // of the running generation; 0: there is room, nobody marks anything
  std::uint64_t stored_in_generation_ = 0;
  std::array<std::uint32_t, Group::kLastMark + 1> ages_{};  // seen by the hand, decaying
  std::uint32_t ages_noted_ = 0;
  SlotId hand_slot_ = 0;
  std::size_t hand_cell_ = 0;
  std::map<Tick, std::vector<std::pair<SlotId, EngineKey>>> graces_;  // by their end
  std::atomic<Tick> next_end_ = kNever;
  static constexpr Tick kNever = 0xffffffff;
  BatchReader reader_;
  std::vector<std::uint64_t> chain_hashes_;
  mutable std::mutex mutex_;
};

}  // namespace pointsman
