// SPDX-License-Identifier: Apache-2.0
// The bound of the whole index: our own least recently matched entries go.
//
// Blocks carry the mark of the generation in which they were last stored or matched; a generation is a 32nd of the bound
// in stored blocks. A hand goes round all slots, notes the ages it sees, and takes those that belong to the oldest
// eighth of them. O(8) blocks looked at per block that goes.
#include <algorithm>
#include <numeric>

#include "atomics.hpp"
#include "index.hpp"

namespace pointsman {
namespace {

constexpr std::size_t kGenerations = 32;  // per bound
constexpr std::size_t kShare = 8;         // one in so many goes
constexpr std::uint32_t kNoted = 1 << 14;  // ages noted before they count half
constexpr unsigned kOldest = Group::kLastMark;  // or never marked
// Rounds after which nothing is left that could go: only what has no identity yet, and that has its own bound.
constexpr int kMostRounds = 12;

}  // namespace

void PrefixIndex::next_age(std::uint64_t stored) {
  if (mark_ == 0 && total_blocks_ <= limits_.blocks / 2) return;
  stored_in_generation_ += stored;
  if (mark_ != 0 && stored_in_generation_ < limits_.blocks / kGenerations) return;
  stored_in_generation_ = 0;
  mark_ = mark_ == Group::kLastMark ? 1 : mark_ + 1;
  store(header_.touching, mark_);
}

std::size_t PrefixIndex::evict() {
  std::size_t gone = 0;
  unsigned age = oldest_share();
  for (int rounds = 0; total_blocks_ > limits_.blocks && rounds < kMostRounds;) {
    if (hand_slot_ >= slots_.size()) {
      hand_slot_ = 0;
      hand_cell_ = 0;
      // The first time round it had not begun at the beginning.
      if (++rounds > 1) age = age > 1 ? std::min(age / 2, oldest_share()) : 0;
      continue;
    }
    Slot* slot = find_slot(hand_slot_);
    if (slot != nullptr && !slot->alive) {  // nobody asks for these, so they go without being counted
      sweep_locked(std::max<std::size_t>(slot->blocks.cells(), 1));
      slot = nullptr;
    }
    if (slot == nullptr || hand_cell_ >= slot->blocks.cells()) {
      ++hand_slot_;
      hand_cell_ = 0;
    } else if (evict_cell(hand_slot_, *slot, age)) {
      ++gone;
    } else {
      ++hand_cell_;
    }
  }
  return gone;
}

// Whether the block under the hand went; another may have taken its cell.
bool PrefixIndex::evict_cell(SlotId id, Slot& slot, unsigned least_age) {
  Block& block = slot.blocks.cell(hand_cell_);
  if (block.key == 0 || !block.identified()) return false;
  const NodeTable::Place place = nodes_.find(node_key(block.request_hash));
  const std::uint32_t touched = place.set == nullptr ? 0 : place.mark();
  const unsigned age = touched == 0 ? kOldest : (mark_ + Group::kLastMark - touched) % Group::kLastMark;
  ++ages_[age];
  if (++ages_noted_ == kNoted) {
    for (std::uint32_t& count : ages_) count /= 2;
    ages_noted_ = std::accumulate(ages_.begin(), ages_.end(), 0U);
  }
  if (age < least_age && (block.held() || block.demoting())) return false;
  count(slot, block, -1);
  unpublish_all(id, block);
  slot.blocks.erase(&block);
  show_counts(id, slot);
  return true;
}

// The age from which on a block belongs to the oldest; never of this generation.
unsigned PrefixIndex::oldest_share() const {
  std::uint32_t older = 0;
  for (unsigned age = kOldest; age > 1; --age) {
    older += ages_[age];
    if (older * kShare > ages_noted_) return age;
  }
  return 1;
}

}  // namespace pointsman
