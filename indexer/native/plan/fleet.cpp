// SPDX-License-Identifier: Apache-2.0
// What is written when it changes: rows, constants, slots. The decision itself: decide.cpp.
#include "fleet.hpp"

#include <algorithm>
#include <cmath>

namespace pointsman {

void SlotStamps::set(SlotId slot, double at_s) {
  const std::lock_guard lock(mutex_);
  if (slot >= at_s_.size()) at_s_.resize(std::max<std::size_t>(slot + 1, at_s_.size() * 2), kNever);
  at_s_[slot] = at_s;
}

std::optional<double> SlotStamps::newest(std::span<const SlotId> slots) const {
  const std::lock_guard lock(mutex_);
  double latest_s = kNever;
  for (const SlotId slot : slots) {
    if (slot < at_s_.size()) latest_s = std::max(latest_s, at_s_[slot]);
  }
  return latest_s == kNever ? std::nullopt : std::optional(latest_s);
}

namespace plan {

double TrustSettings::trust(const TrustRecord& record, double now_s) const {
  if (record.promised <= 0) return 1.0;
  const double left = std::exp(-std::max(now_s - record.at_s, 0.0) / memory_s);
  const double share = (record.kept * left + good_faith_tokens) / (record.promised * left + good_faith_tokens);
  return std::max(share, least);
}

std::uint32_t FleetPlanner::add_rows(std::span<const Row> ranks) {
  const std::lock_guard lock(mutex_);
  worker(ranks.front().worker);
  std::size_t first = 0, free = 0;
  while (first + free < rows_.size() && free < ranks.size()) {
    if (rows_[first + free].worker == kNone) {
      ++free;
    } else {
      first += free + 1;
      free = 0;
    }
  }
  if (first + ranks.size() > rows_.size()) rows_.resize(first + ranks.size());
  std::ranges::copy(ranks, rows_.begin() + static_cast<std::ptrdiff_t>(first));
  return static_cast<std::uint32_t>(first);
}

void FleetPlanner::remove_rows(std::uint32_t first) {
  const std::lock_guard lock(mutex_);
  unbind_locked(rows_[first].worker);
  const std::uint32_t ranks = rows_[first].ranks;
  std::fill_n(rows_.begin() + first, ranks, Row{});
}

void FleetPlanner::forget(std::uint32_t number) {
  const std::lock_guard lock(mutex_);
  unbind_locked(number);
  workers_[number] = {};
  std::vector<std::uint64_t> gone;
  links_.for_each([&](std::uint64_t pair, const Link&) {
    if (pair >> 32 == number || (pair & 0xffffffff) == number) gone.push_back(pair);
  });
  for (const std::uint64_t pair : gone) links_.erase(pair);
}

void FleetPlanner::set_costs(std::uint32_t number, const CostModel& costs) {
  const std::lock_guard lock(mutex_);
  worker(number).costs = costs;
}

void FleetPlanner::set_trust(std::uint32_t number, const TrustRecord& record) {
  const std::lock_guard lock(mutex_);
  worker(number).trust = record;
}

void FleetPlanner::set_usual_link(const Link& link) {
  const std::lock_guard lock(mutex_);
  usual_link_ = link;
  note_link(link);
}

void FleetPlanner::set_link(std::uint32_t source, std::uint32_t destination, const Link& link) {
  const std::lock_guard lock(mutex_);
  links_[std::uint64_t{source} << 32 | destination] = link;
  note_link(link);
}

// What was true of a link that has changed may stay in the bound for as many changes as there are links.
void FleetPlanner::note_link(const Link& link) {
  least_pull_.include(link);
  if (++links_written_ <= links_.size()) return;
  links_written_ = 0;
  least_pull_ = {};
  least_pull_.include(usual_link_);
  links_.for_each([&](std::uint64_t, const Link& one) { least_pull_.include(one); });
}

void FleetPlanner::unset_link(std::uint32_t source, std::uint32_t destination) {
  const std::lock_guard lock(mutex_);
  links_.erase(std::uint64_t{source} << 32 | destination);
}

void FleetPlanner::bind_slots(std::uint32_t first_row, std::span<const SlotId> slots,
                              const std::vector<bool>& suspect, SlotId store) {
  const std::lock_guard lock(mutex_);
  const Row& first = rows_[first_row];
  unbind_locked(first.worker);
  Worker& one = worker(first.worker);
  one.registered = true;
  one.slots.assign(slots.begin(), slots.end());
  one.store = store;
  const SlotId highest = std::max(store, slots.empty() ? SlotId{0} : std::ranges::max(slots));
  if (highest >= bindings_.size()) bindings_.resize(std::max<std::size_t>(highest + 1, bindings_.size() * 2));
  const auto known = std::min<std::uint32_t>(first.ranks, static_cast<std::uint32_t>(slots.size()));
  for (std::uint32_t rank = 0; rank < known; ++rank) {
    if (!suspect[rank]) bindings_[slots[rank]] = {first_row + rank, 1};
  }
  bindings_[store] = {first_row, known};
}

void FleetPlanner::unbind_slots(std::uint32_t number) {
  const std::lock_guard lock(mutex_);
  unbind_locked(number);
}

void FleetPlanner::unbind_locked(std::uint32_t number) {
  Worker& one = worker(number);
  for (const SlotId slot : one.slots) bindings_[slot] = {};
  if (one.registered) bindings_[one.store] = {};
  one.registered = false;
  one.slots.clear();
}

FleetPlanner::Worker& FleetPlanner::worker(std::uint32_t number) {
  if (number >= workers_.size()) workers_.resize(number + 1);
  return workers_[number];
}

}  // namespace plan
}  // namespace pointsman
