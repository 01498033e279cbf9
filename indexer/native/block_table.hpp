// SPDX-License-Identifier: Apache-2.0
// The blocks of one slot by engine key: what the engine calls a block -> what it is and where it lies. The writer's.
//
// Open addressing in the order of the keys (keys are even hashes, so the home of a key is its share of the table):
// cells of a run are sorted, a search ends at the first larger key, and the table grows by a quarter in place, run by
// run from the last on: homes only move to the right, and by more than a run is long before the next begins. 20 bytes a
// cell, 64 to 80 % of them full.
// Pointers are good until the next insert or erase.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <utility>
#include <vector>

#include "pages.hpp"
#include "touch.hpp"

namespace pointsman {

#pragma pack(push, 4)
struct Block {
  static constexpr std::uint8_t kIdentified = 1;
  static constexpr std::uint8_t kDoubtfulRam = 2;
  static constexpr std::uint8_t kStored = 4;    // in storage, waiting to be named
  static constexpr std::uint8_t kDemoting = 8;  // on its way from HBM to RAM; `hbm` is then the end of its grace

  std::uint64_t key = 0;  // 0: the cell is empty
  std::uint64_t request_hash = 0;
  std::uint16_t hbm = 0;  // references
  std::uint8_t ram = 0;
  std::uint8_t flags = 0;

  [[nodiscard]] bool has(std::uint8_t flag) const { return (flags & flag) != 0; }
  void set(std::uint8_t flag, bool on) { flags = static_cast<std::uint8_t>(on ? flags | flag : flags & ~flag); }
  [[nodiscard]] bool identified() const { return has(kIdentified); }
  [[nodiscard]] bool in_hbm() const { return hbm != 0 && !has(kDemoting); }
  [[nodiscard]] bool demoting() const { return has(kDemoting); }
  // Any references.
  [[nodiscard]] bool held() const { return in_hbm() || ram != 0 || has(kStored); }
  void end_demotion() {
    set(kDemoting, false);
    hbm = 0;
  }
};
#pragma pack(pop)
static_assert(sizeof(Block) == 20);

class BlockTable {
 public:
  [[nodiscard]] std::size_t size() const { return size_; }
  [[nodiscard]] std::size_t cells() const { return cells_.count(); }
  [[nodiscard]] std::size_t memory_bytes() const { return cells_.bytes(); }
  [[nodiscard]] Block& cell(std::size_t index) { return cells_[index]; }

  // Loads what a search for each of these keys begins with.
  void touch(std::span<const std::uint64_t> keys) const {
    if (share_ == 0) return;
    std::uint64_t sum = 0;
    for (const std::uint64_t key : keys) {
      const std::size_t at = home(key);
      for (std::size_t line = 0; line < kTouchedCells; line += kCellsPerLine) sum += cells_[at + line].key;
    }
    keep_loads(sum);
  }

  [[nodiscard]] Block* find(std::uint64_t key) {
    if (size_ == 0) return nullptr;
    const std::size_t at = seek(key);
    return at < cells() && cells_[at].key == key ? &cells_[at] : nullptr;
  }

  // The block of a key and whether it is new.
  std::pair<Block*, bool> insert(std::uint64_t key) {
    if ((size_ + 1) * 5 > share_ * 4) grow();
    for (;;) {
      const std::size_t at = seek(key);
      if (at < cells() && cells_[at].key == key) return {&cells_[at], false};
      std::size_t empty = at;
      while (empty < cells() && cells_[empty].key != 0) ++empty;
      if (empty == cells()) {  // a run grew over the end
        grow();
        continue;
      }
      std::memmove(static_cast<void*>(&cells_[at + 1]), &cells_[at], (empty - at) * sizeof(Block));
      cells_[at] = Block{.key = key};
      ++size_;
      return {&cells_[at], true};
    }
  }

  void erase(Block* block) {
    auto at = static_cast<std::size_t>(block - &cells_[0]);
    std::size_t end = at + 1;
    while (end < cells() && cells_[end].key != 0 && home(cells_[end].key) < end) ++end;
    std::memmove(static_cast<void*>(&cells_[at]), &cells_[at + 1], (end - at - 1) * sizeof(Block));
    cells_[end - 1] = Block{};
    --size_;
    shrink_if_sparse();
  }

  // Visits every block; those for which `keep` is false are erased.
  template <typename Keep>
  void filter(Keep&& keep) {
    std::size_t to = cells();
    for (std::size_t from = cells(); from-- > 0;) {
      if (cells_[from].key == 0) continue;
      if (keep(cells_[from])) cells_[--to] = cells_[from];
    }
    size_ = cells() - to;
    deal_out(to);
    shrink_if_sparse();
  }

  template <typename Visit>
  void for_each(Visit&& visit) const {
    for (std::size_t i = 0; i < cells(); ++i) {
      if (cells_[i].key != 0) visit(cells_[i]);
    }
  }

  [[nodiscard]] bool consistent() const {
    std::size_t count = 0;
    std::uint64_t before = 0;
    for (std::size_t i = 0; i < cells(); ++i) {
      const std::uint64_t key = cells_[i].key;
      if (key == 0) continue;
      ++count;
      if (key <= before || home(key) > i) return false;
      for (std::size_t between = home(key); between < i; ++between) {
        if (cells_[between].key == 0) return false;
      }
      before = key;
    }
    return count == size_;
  }

 private:
  static constexpr std::size_t kLeastShare = 12;
  // A search and the run that an insert moves: four cache lines mostly. There is always a tail as long.
  static constexpr std::size_t kCellsPerLine = 3, kTouchedCells = 4 * kCellsPerLine;

  [[nodiscard]] std::size_t home(std::uint64_t key) const {
    return static_cast<std::size_t>(static_cast<unsigned __int128>(key) * share_ >> 64);
  }
  // Where the key is, or would be.
  [[nodiscard]] std::size_t seek(std::uint64_t key) const {
    std::size_t at = home(key);
    while (at < cells() && cells_[at].key != 0 && cells_[at].key < key) ++at;
    return at;
  }
  // Cells behind the last home take what runs over it.
  static std::size_t with_tail(std::size_t share) { return share + share / 256 + kTouchedCells; }

  void grow() {
    share_ = std::max(kLeastShare, share_ + share_ / 4);
    const std::size_t before = cells();
    cells_.resize(std::max(before, with_tail(share_)));
    std::vector<Block> run;
    for (std::size_t end = before; end != 0;) {
      if (cells_[end - 1].key == 0) {
        --end;
        continue;
      }
      std::size_t start = end - 1;
      while (start != 0 && cells_[start - 1].key != 0) --start;
      run.assign(&cells_[start], &cells_[start] + (end - start));
      for (std::size_t i = start; i < end; ++i) cells_[i] = Block{};
      std::size_t free = 0;
      for (const Block& block : run) {
        const std::size_t at = std::max(home(block.key), free);
        if (at >= cells()) cells_.resize(at + at / 8 + 8);
        cells_[at] = block;
        free = at + 1;
      }
      end = start;
    }
  }

  // Cells [first, end) are all there are, sorted: gives each its place from the front.
  void deal_out(std::size_t first) {
    std::size_t free = 0;
    for (std::size_t from = first; from < cells(); ++from) {
      const Block block = cells_[from];
      if (home(block.key) > from) {  // the tail is too short for what has its home near the end
        const std::size_t before = cells();
        cells_.resize(before + before / 8 + 8);
        const std::size_t longer = cells() - before;
        std::memmove(static_cast<void*>(&cells_[from + longer]), &cells_[from], (before - from) * sizeof(Block));
        from += longer - 1;
        continue;
      }
      for (const std::size_t at = std::max(home(block.key), free); free < at; ++free) cells_[free] = Block{};
      cells_[free++] = block;
    }
    for (; free < cells(); ++free) cells_[free] = Block{};
  }

  void shrink_if_sparse() {
    if (share_ <= kLeastShare || size_ * 3 > share_) return;
    BlockTable smaller;
    if (size_ != 0) {
      smaller.share_ = std::max(kLeastShare, size_ * 3 / 2);
      smaller.cells_.resize(with_tail(smaller.share_));
      smaller.size_ = size_;
      std::size_t to = smaller.cells() - size_;
      for_each([&](const Block& block) { smaller.cells_[to++] = block; });
      smaller.deal_out(smaller.cells() - size_);
    }
    std::swap(share_, smaller.share_);
    cells_.swap(smaller.cells_);
  }

  Pages<Block> cells_;
  std::size_t share_ = 0;  // homes
  std::size_t size_ = 0;
};

}  // namespace pointsman
