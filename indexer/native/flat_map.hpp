// SPDX-License-Identifier: Apache-2.0
// A hash map with linear probing and backward-shift deletion: no tombstones, so lookups stay short under churn.
// Load is at most 3/4. References and iteration are invalidated by insert and erase.
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "mix.hpp"
#include "page_allocator.hpp"

namespace pointsman {

template <typename Key, typename Value, typename Hash>
class FlatMap {
 public:
  [[nodiscard]] std::size_t size() const noexcept { return size_; }
  [[nodiscard]] bool empty() const noexcept { return size_ == 0; }
  [[nodiscard]] std::size_t memory_bytes() const noexcept { return slots_.capacity() * sizeof(Slot); }

  Value* find(const Key& key) noexcept { return const_cast<Value*>(std::as_const(*this).find(key)); }

  const Value* find(const Key& key) const noexcept {
    if (size_ == 0) return nullptr;
    for (std::size_t i = home(key);; i = (i + 1) & mask_) {
      const Slot& slot = slots_[i];
      if (!slot.used) return nullptr;
      if (slot.key == key) return &slot.value;
    }
  }

  // Asks for the memory that find(key) will read.
  void prefetch(const Key& key) const noexcept {
    if (size_ != 0) __builtin_prefetch(&slots_[home(key)]);
  }

  // The value of `key`, made by default if absent.
  Value& operator[](const Key& key) {
    if ((size_ + 1) * 4 > slots_.size() * 3) grow();
    for (std::size_t i = home(key);; i = (i + 1) & mask_) {
      Slot& slot = slots_[i];
      if (slot.used && slot.key == key) return slot.value;
      if (!slot.used) {
        slot.key = key;
        slot.value = Value{};
        slot.used = true;
        ++size_;
        return slot.value;
      }
    }
  }

  bool erase(const Key& key) {
    if (size_ == 0) return false;
    std::size_t i = home(key);
    for (;; i = (i + 1) & mask_) {
      if (!slots_[i].used) return false;
      if (slots_[i].key == key) break;
    }
    for (std::size_t next = (i + 1) & mask_; slots_[next].used; next = (next + 1) & mask_) {
      // An entry may fill the hole unless its home lies cyclically in (hole, next].
      if (((next - home(slots_[next].key)) & mask_) >= ((next - i) & mask_)) {
        slots_[i].key = std::move(slots_[next].key);
        slots_[i].value = std::move(slots_[next].value);
        i = next;
      }
    }
    slots_[i].used = false;
    slots_[i].value = Value{};
    --size_;
    return true;
  }

  void clear() {
    slots_ = {};
    size_ = mask_ = 0;
  }

  template <typename Visit>
  void for_each(Visit&& visit) {
    for (Slot& slot : slots_) {
      if (slot.used) visit(slot.key, slot.value);
    }
  }

  template <typename Visit>
  void for_each(Visit&& visit) const {
    for (const Slot& slot : slots_) {
      if (slot.used) visit(slot.key, slot.value);
    }
  }

  // Visits the used slots among positions [from, from + count) and returns the position after them; the end
  // is slots(). Lets a long walk be spread over many calls while nothing is inserted or erased.
  template <typename Visit>
  std::size_t visit_range(std::size_t from, std::size_t count, Visit&& visit) {
    const std::size_t to = from + count < slots_.size() ? from + count : slots_.size();
    for (; from < to; ++from) {
      if (slots_[from].used) visit(slots_[from].key, slots_[from].value);
    }
    return to;
  }
  [[nodiscard]] std::size_t slots() const noexcept { return slots_.size(); }

 private:
  struct Slot {
    Key key{};
    Value value{};
    bool used = false;
  };
  using Slots = std::vector<Slot, PageAllocator<Slot>>;

  [[nodiscard]] std::size_t home(const Key& key) const noexcept { return Hash{}(key) & mask_; }

  void grow() {
    Slots old = std::exchange(slots_, {});
    slots_.resize(old.empty() ? 16 : old.size() * 2);
    mask_ = slots_.size() - 1;
    size_ = 0;
    for (Slot& slot : old) {
      if (slot.used) (*this)[slot.key] = std::move(slot.value);
    }
  }

  Slots slots_;
  std::size_t mask_ = 0;
  std::size_t size_ = 0;
};

}  // namespace pointsman
