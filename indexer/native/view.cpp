// SPDX-License-Identifier: Apache-2.0
#include "view.hpp"

#include <algorithm>
#include <bit>
#include <cstring>
#include <tuple>

#include "atomics.hpp"

namespace pointsman {
namespace {

constexpr std::size_t kPrefetched = 8;  // look-ups on their way from memory at a time
// A reader that the writer overtakes again and again gives up: the prompt ends there for it.
constexpr int kTries = 1000;

}  // namespace

// Who holds the block that a walk along a prompt has come to, and since when.
class OpenRuns {
 public:
  OpenRuns(const IndexView& view, std::vector<Run>& runs, Tick now)
      : view_(view), runs_(runs), now_(now), held_(buffers_.held), changes_(buffers_.changes), starts_(buffers_.starts) {
    held_.clear();
  }

  // Notes what of a set differs from what is held, in clusters. False: that is being written, and may be anything.
  bool read(const SetHeader& set) {
    changes_.clear();
    const std::uint64_t size = load(set.size);
    const std::uint64_t start = std::uint64_t{load(set.unit)} * 64;
    if (!within(start, size * sizeof(Cluster))) return false;
    const auto* words = view_.at<std::uint64_t>(start);
    std::size_t at = 0;
    for (std::uint64_t i = 0; i < size; ++i, words += 2) {
      const std::uint64_t name = load(words[1]);
      if (at < held_.size() && held_[at].name == name) {
        ++at;
        continue;
      }
      const Cluster cluster{load(words[0]), name};
      for (; at < held_.size() && held_[at].range < cluster.range(); ++at) changes_.push_back({held_[at].range, 0, {}});
      if (at < held_.size() && held_[at].range == cluster.range()) ++at;
      if (!copy(cluster)) return false;
    }
    for (; at < held_.size(); ++at) changes_.push_back({held_[at].range, 0, {}});
    return true;
  }

  // What was noted is so from block `block` on.
  void take(std::uint32_t block) {
    std::size_t at = 0;
    for (const Held& change : changes_) {
      while (at < held_.size() && held_[at].range < change.range) ++at;
      const bool known = at < held_.size() && held_[at].range == change.range;
      if (!known) held_.insert(held_.begin() + static_cast<std::ptrdiff_t>(at), {change.range, 0, {}});
      move(held_[at], change, block);
      if (change.name == 0) held_.erase(held_.begin() + static_cast<std::ptrdiff_t>(at));
    }
  }

  // Nobody holds block `block`.
  void end(std::uint32_t block) {
    for (Held& one : held_) move(one, {one.range, 0, {}}, block);
    held_.clear();
  }

  // Whether any of those that hold the block is alive.
  [[nodiscard]] bool any() const {
    for (const Held& one : held_) {
      for (std::size_t i = 0; i < Cluster::kSlots; ++i) {
        if (one.kinds[i] != 0 && view_.place_of(slot_of(one, i)) != kNobodyHere) return true;
      }
    }
    return false;
  }

 private:
  // What the slots of a range have of the block: a bit per kind.
  struct Held {
    std::uint32_t range;
    std::uint64_t name;  // of the cluster; 0: there is none
    std::array<std::uint8_t, Cluster::kSlots> kinds;
  };

  static SlotId slot_of(const Held& held, std::size_t place) {
    return static_cast<SlotId>(held.range * Cluster::kSlots + place);
  }
  [[nodiscard]] bool within(std::uint64_t start, std::uint64_t bytes) const {
    return start + bytes <= view_.header_.bytes;
  }

  bool copy(const Cluster& cluster) {
    const std::uint64_t start = std::uint64_t{cluster.unit()} * 64;
    if (cluster.size() > Cluster::kSlots || !within(start, cluster.size() * sizeof(Holding))) return false;
    Held& held = changes_.emplace_back(Held{cluster.range(), cluster.name, {}});
    const auto* words = view_.at<std::uint64_t>(start);
    for (std::size_t i = 0; i < cluster.size(); ++i, words += 2) {
      const std::array both = {load(words[0]), load(words[1])};
      const auto holding = std::bit_cast<Holding>(both);
      held.kinds[holding.slot % Cluster::kSlots] = static_cast<std::uint8_t>(holding.kinds(now_));
    }
    return true;
  }

  void move(Held& held, const Held& change, std::uint32_t block) {
    constexpr std::size_t kWord = sizeof(std::uint64_t);
    for (std::size_t first = 0; first < Cluster::kSlots; first += kWord) {
      if (std::memcmp(&held.kinds[first], &change.kinds[first], kWord) == 0) continue;
      for (std::size_t i = first; i < first + kWord; ++i) {
        if (held.kinds[i] != change.kinds[i]) move(slot_of(held, i), held.kinds[i], change.kinds[i], block);
      }
    }
    held = change;
  }

  // From `block` on, `slot` holds it as `now` says instead of as `before`.
  void move(SlotId slot, unsigned before, unsigned now, std::uint32_t block) {
    // A slot that is retired meanwhile never gets another place, so no run of it is ever taken for another's.
    const std::uint32_t place = view_.place_of(slot);
    if (place == kNobodyHere) return;
    if (starts_.size() < (std::size_t{place} + 1) * kKinds) starts_.resize((std::size_t{place} + 1) * kKinds * 2);
    std::uint32_t* starts = &starts_[std::size_t{place} * kKinds];
    for (unsigned moved = before ^ now; moved != 0; moved &= moved - 1) {
      const auto kind = static_cast<unsigned>(std::countr_zero(moved));
      if ((now >> kind & 1) != 0) {
        starts[kind] = block;
        continue;
      }
      const auto tier = static_cast<std::uint8_t>(kind < kTiers ? kind : index_of(Tier::ram));
      runs_.push_back({slot, tier, kind == kDoubtfulRam, kind == kDemoting, starts[kind], block});
    }
  }

  // Kept from one match to the next.
  struct Buffers {
    std::vector<Held> held, changes;
    std::vector<std::uint32_t> starts;
  };

  static thread_local Buffers buffers_;
  const IndexView& view_;
  std::vector<Run>& runs_;
  Tick now_;
  std::vector<Held>& held_;     // by range
  std::vector<Held>& changes_;  // noted, by range
  std::vector<std::uint32_t>& starts_;  // by place of the slot and kind
};

thread_local OpenRuns::Buffers OpenRuns::buffers_;

void IndexView::match(std::span<const std::uint64_t> hashes, std::vector<Run>& runs, Tick now) const {
  OpenRuns open(*this, runs, now);
  const auto* sets = at<SetHeader>(header_.sets);
  const std::uint32_t mark = nodes_ == nullptr ? 0 : load(header_.touching);
  for (std::size_t i = 0; i < std::min(kPrefetched, hashes.size()); ++i) prefetch(node_key(hashes[i]));
  std::uint32_t last = 0, version = 0, block = 0;
  for (; block < hashes.size(); ++block) {
    if (block + kPrefetched < hashes.size()) prefetch(node_key(hashes[block + kPrefetched]));
    const std::uint64_t hash = node_key(hashes[block]);
    const std::uint32_t set = find(hash, mark);
    if (set == 0) break;
    if (set == last && load(sets[set].version) == version) continue;
    std::tie(last, version) = read_set(hash, set, open);
    if (last == 0) break;
    open.take(block);
    // Blocks of retired slots stay in the table until they are swept.
    if (!open.any()) break;
  }
  open.end(block);
}

std::uint32_t IndexView::find(std::uint64_t hash, std::uint32_t mark) const {
  const auto* words = at<std::uint64_t>(header_.shards);
  for (int tries = 0; tries < kTries; ++tries) {
    const std::uint32_t shards = load(header_.shard_count);
    const std::uint32_t shard = shard_of(hash, shards);
    const ShardWord word{load(words[shard])};
    const std::uint32_t groups = word.groups();
    const auto* table = at<Group>(std::uint64_t{word.unit()} * 64);
    std::uint32_t found = 0;
    std::uint32_t g = groups == 0 ? 0 : home_of(hash, groups);
    bool going = groups != 0;
    // While the table is in use it has an empty place; once it is not, this might be anything, but it ends.
    for (std::uint32_t seen = 0; going && seen < groups; ++seen, g = g + 1 == groups ? 0 : g + 1) {
      for (std::size_t i = 0; i < Group::kPlaces && going; ++i) {
        const std::uint64_t here = load(table[g].hashes[i]);
        if (here == hash) {
          found = load(table[g].sets[i]);
          if (mark != 0) touch(table[g], i, mark);
        }
        going = here != hash && here != 0;
      }
    }
    // In this order: see layout.hpp.
    if (load(header_.shard_count) == shards && load(words[shard]) == word.value) return found;
  }
  return 0;
}

void IndexView::prefetch(std::uint64_t hash) const {
  const ShardWord word{load(at<std::uint64_t>(header_.shards)[shard_of(hash, load(header_.shard_count))])};
  const std::uint32_t groups = word.groups();
  if (groups != 0) __builtin_prefetch(at<Group>(std::uint64_t{word.unit()} * 64) + home_of(hash, groups));
}

void IndexView::touch(const Group& group, std::size_t place, std::uint32_t mark) const {
  const std::uint32_t marks = load(group.marks, std::memory_order_relaxed);
  if (Group::mark_at(marks, place) == mark) return;
  const auto offset = reinterpret_cast<const std::byte*>(&group.marks) - region_ - static_cast<std::ptrdiff_t>(header_.nodes);
  // Two who write at once may undo each other: a mark is a hint.
  store(*reinterpret_cast<std::uint32_t*>(nodes_ + offset), Group::with_mark(marks, place, mark), std::memory_order_relaxed);
}

std::pair<std::uint32_t, std::uint32_t> IndexView::read_set(std::uint64_t hash, std::uint32_t set,
                                                            OpenRuns& open) const {
  for (int tries = 0; tries < kTries && set != 0; ++tries) {
    const SetHeader& header = at<SetHeader>(header_.sets)[set];
    const std::uint32_t version = load(header.version);
    const bool whole = version % 2 == 0 && open.read(header);
    const std::uint32_t again = find(hash);
    // First that the block still names the set, then that the set is still what was read.
    if (whole && again == set && load(header.version) == version) return {set, version};
    set = again;
  }
  return {};
}

std::uint32_t IndexView::place_of(SlotId slot) const {
  return slot < header_.max_slots ? load(at<std::uint32_t>(header_.slots)[slot]) : kNobodyHere;
}

bool IndexView::alive(SlotId slot) const { return slot < load(header_.slot_count) && place_of(slot) != kNobodyHere; }

std::optional<SlotEntry> IndexView::slot(SlotId slot) const {
  if (!alive(slot)) return std::nullopt;
  const std::uint32_t place = place_of(slot);
  if (place == kNobodyHere) return std::nullopt;
  auto entry = read_record(place);
  return entry && entry->slot == slot ? std::move(entry) : std::nullopt;
}

std::vector<SlotEntry> IndexView::slots() const {
  std::vector<SlotEntry> found;
  const std::uint32_t places = load(header_.record_count);
  for (std::uint32_t place = 0; place < places; ++place) {
    auto entry = read_record(place);
    if (entry && place_of(entry->slot) == place) found.push_back(std::move(*entry));
  }
  return found;
}

std::optional<SlotEntry> IndexView::read_record(std::uint32_t place) const {
  const SlotRecord& record = at<SlotRecord>(header_.records)[place];
  for (int tries = 0; tries < kTries; ++tries) {
    const std::uint32_t version = load(record.version);
    if (version % 2 != 0) continue;
    SlotEntry entry;
    entry.slot = load(record.slot);
    entry.suspect = (load(record.flags) & kSuspect) != 0;
    SlotCounts& counts = entry.counts;
    for (std::size_t tier = 0; tier < kTiers; ++tier) counts.blocks[tier] = load(record.counts[tier]);
    counts.doubtful_ram = load(record.counts[3]);
    counts.unidentified = load(record.counts[4]);
    counts.detached = load(record.counts[5]);
    counts.remembered = load(record.counts[6]);
    counts.demoting = load(record.counts[7]);
    counts.block_size = load(record.block_size);
    std::array<std::uint64_t, SlotRecord::kNameWords> words;
    for (std::size_t i = 0; i < words.size(); ++i) words[i] = load(record.name[i]);
    const std::size_t bytes = std::min<std::size_t>(load(record.name_bytes), sizeof words);
    entry.name.assign(reinterpret_cast<const char*>(words.data()), bytes);
    if (load(record.version) == version) return entry;
  }
  return std::nullopt;
}

}  // namespace pointsman
