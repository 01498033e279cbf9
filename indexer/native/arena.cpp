// SPDX-License-Identifier: Apache-2.0
#include "arena.hpp"

#include <algorithm>
#include <iterator>
#include <new>

namespace pointsman {
namespace {

constexpr std::size_t kCommitUnits = 256 * 1024 / Arena::kUnitBytes;
// A free run from this size on holds no pages.
constexpr std::size_t kReleasedUnits = 256 * 1024 / Arena::kUnitBytes;

}  // namespace

Arena::Arena(const Mapping& region, std::size_t offset, std::size_t bytes)
    : region_(region),
      begin_(offset / kUnitBytes),
      limit_((offset + bytes) / kUnitBytes),
      end_(begin_),
      committed_(begin_) {}

Arena::Unit Arena::allocate(std::size_t units) {
  const auto fitting = by_size_.lower_bound({static_cast<Unit>(units), 0});
  if (fitting == by_size_.end()) {
    if (end_ + units > limit_) throw std::bad_alloc();
    commit(end_ + units);
    const auto at = static_cast<Unit>(end_);
    end_ += units;
    used_ += units;
    return at;
  }
  const auto [size, start] = *fitting;
  // A large run gave its pages back, so the file system is asked again: for all of it where the rest will be small.
  if (size >= kReleasedUnits) {
    const std::size_t asked = size - units < kReleasedUnits ? size : units;
    region_.commit(std::size_t{start} * kUnitBytes, asked * kUnitBytes);
  }
  erase(runs_.find(start));
  if (size > units) insert(start + static_cast<Unit>(units), size - static_cast<Unit>(units));
  used_ += units;
  return start;
}

void Arena::free(Unit at, std::size_t units) {
  used_ -= units;
  Unit start = at, size = static_cast<Unit>(units);
  auto next = runs_.lower_bound(at);
  if (next != runs_.end() && next->first == at + units) {
    size += next->second;
    erase(next++);
  }
  if (next != runs_.begin()) {
    const auto before = std::prev(next);
    if (before->first + before->second == at) {
      start = before->first;
      size += before->second;
      erase(before);
    }
  }
  const bool last = start + std::size_t{size} == end_;
  if (size >= kReleasedUnits) {
    // Only what is newly free, out to the page edges that it shares with the rest of the run.
    const std::size_t page = kPageBytes / kUnitBytes;
    const std::size_t from = std::max<std::size_t>(start, at - std::min<std::size_t>(at, page - 1));
    const std::size_t to = std::min<std::size_t>(start + size, at + units + page - 1);
    region_.release(from * kUnitBytes, (to - from) * kUnitBytes);
  }
  if (last) {
    end_ = start;
    committed_ = std::min(committed_, end_);
  } else {
    insert(start, size);
  }
}

void Arena::prepare(std::size_t bytes) {
  const std::size_t units = bytes / kUnitBytes + 1;
  if (end_ + units > limit_) throw std::bad_alloc();
  commit(end_ + units);
}

void Arena::insert(Unit start, Unit size) {
  runs_.emplace(start, size);
  by_size_.emplace(size, start);
}

void Arena::erase(std::map<Unit, Unit>::iterator run) {
  by_size_.erase({run->second, run->first});
  runs_.erase(run);
}

void Arena::commit(std::size_t end) {
  if (end <= committed_) return;
  const std::size_t to = std::min(std::max(end, committed_ + kCommitUnits), limit_);
  region_.commit(committed_ * kUnitBytes, (to - committed_) * kUnitBytes);
  committed_ = to;
}

}  // namespace pointsman
