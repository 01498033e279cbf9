// SPDX-License-Identifier: Apache-2.0
#include "view.hpp"

#include <algorithm>
#include <bit>
#include <cstring>

#include "atomics.hpp"

namespace pointsman {
namespace {

constexpr std::size_t kPrefetched = 8;  // look-ups on their way from memory at a time
// A reader that the writer overtakes again and again gives up: the prompt ends there for it.
constexpr int kTries = 1000;

}  // namespace

// Runs that are open while a prompt is walked, by place of the slot and kind.
class OpenRuns {
 public:
  OpenRuns(const IndexView& view, std::vector<Run>& runs, Tick now) : view_(view), runs_(runs), now_(now) {}

  // The same for all slots of two sets, in the order of the slots. O(both).
  void change(std::span<const Holding> before, std::span<const Holding> now, std::uint32_t at) {
    auto old = before.begin();
    auto fresh = now.begin();
    while (old != before.end() && fresh != now.end()) {
      if (*old == *fresh) {
        // Mostly long stretches are equal.
        const auto left = std::min(before.end() - old, now.end() - fresh);
        const std::ptrdiff_t equal = left < kStretch || !same(&*old, &*fresh) ? 1 : kStretch;
        old += equal, fresh += equal;
      } else if (old->slot == fresh->slot) {
        change(old->slot, old->kinds(now_), fresh->kinds(now_), at);
        ++old, ++fresh;
      } else if (old->slot < fresh->slot) {
        change(old->slot, old->kinds(now_), 0, at);
        ++old;
      } else {
        change(fresh->slot, 0, fresh->kinds(now_), at);
        ++fresh;
      }
    }
    for (; old != before.end(); ++old) change(old->slot, old->kinds(now_), 0, at);
    for (; fresh != now.end(); ++fresh) change(fresh->slot, 0, fresh->kinds(now_), at);
  }

 private:
  static constexpr std::ptrdiff_t kStretch = 16;
  static bool same(const Holding* a, const Holding* b) { return std::memcmp(a, b, kStretch * sizeof(Holding)) == 0; }

  // From block `at` on, `slot` holds it as `now` says instead of as `before`.
  void change(SlotId slot, unsigned before, unsigned now, std::uint32_t at) {
    // A slot that is retired meanwhile never gets another place, so no run of it is ever taken for another's.
    const std::uint32_t place = view_.place_of(slot);
    if (place == kNobodyHere) return;
    if (starts_.size() < (std::size_t{place} + 1) * kKinds) starts_.resize((std::size_t{place} + 1) * kKinds * 2);
    std::uint32_t* starts = &starts_[std::size_t{place} * kKinds];
    for (unsigned moved = before ^ now; moved != 0; moved &= moved - 1) {
      const auto kind = static_cast<unsigned>(std::countr_zero(moved));
      if ((now >> kind & 1) != 0) {
        starts[kind] = at;
        continue;
      }
      const auto tier = static_cast<std::uint8_t>(kind < kTiers ? kind : index_of(Tier::ram));
      runs_.push_back({slot, tier, kind == kDoubtfulRam, kind == kDemoting, starts[kind], at});
    }
  }

  static thread_local std::vector<std::uint32_t> starts_;
  const IndexView& view_;
  std::vector<Run>& runs_;
  Tick now_;
};

thread_local std::vector<std::uint32_t> OpenRuns::starts_;

void IndexView::match(std::span<const std::uint64_t> hashes, std::vector<Run>& runs, Tick now) const {
  static thread_local Held last, next;
  last.set = 0;
  last.holdings.clear();
  OpenRuns open(*this, runs, now);
  const auto* sets = at<SetHeader>(header_.sets);
  const std::uint32_t mark = nodes_ == nullptr ? 0 : load(header_.touching);
  for (std::size_t i = 0; i < std::min(kPrefetched, hashes.size()); ++i) prefetch(node_key(hashes[i]));
  std::uint32_t block = 0;
  for (; block < hashes.size(); ++block) {
    if (block + kPrefetched < hashes.size()) prefetch(node_key(hashes[block + kPrefetched]));
    const std::uint64_t hash = node_key(hashes[block]);
    const std::uint32_t set = find(hash, mark);
    if (set == 0) break;
    if (set == last.set && load(sets[set].version) == last.version) continue;
    if (!read_set(hash, set, next)) break;
    // Blocks of retired slots stay in the table until they are swept.
    const auto counts = [&](const Holding& one) { return one.kinds(now) != 0 && place_of(one.slot) != kNobodyHere; };
    if (std::ranges::none_of(next.holdings, counts)) break;
    open.change(last.holdings, next.holdings, block);
    std::swap(last, next);
  }
  open.change(last.holdings, {}, block);
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

bool IndexView::read_set(std::uint64_t hash, std::uint32_t set, Held& held) const {
  for (int tries = 0; tries < kTries && set != 0; ++tries) {
    const bool whole = copy(set, held);
    const std::uint32_t again = find(hash);
    // First that the block still names the set, then that the set is still what was copied.
    if (whole && again == set && load(at<SetHeader>(header_.sets)[set].version) == held.version) return true;
    set = again;
  }
  return false;
}

bool IndexView::copy(std::uint32_t set, Held& held) const {
  const SetHeader& header = at<SetHeader>(header_.sets)[set];
  held.set = set;
  held.version = load(header.version);
  const std::uint64_t size = load(header.size);
  const std::uint64_t start = std::uint64_t{load(header.unit)} * 64;
  // What is being written may name anything.
  if (held.version % 2 != 0 || start + size * sizeof(Holding) > header_.bytes) return false;
  held.holdings.resize(size);
  const auto* words = at<std::uint64_t>(start);
  for (Holding& holding : held.holdings) {
    const std::array<std::uint64_t, 2> both = {load(words[0]), load(words[1])};
    holding = std::bit_cast<Holding>(both);
    words += 2;
  }
  return true;
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
