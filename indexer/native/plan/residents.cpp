// SPDX-License-Identifier: Apache-2.0
// Mirrors router/plan/residents.py: a property test drives both.
#include "residents.hpp"

#include <algorithm>

namespace pointsman {
namespace {

// Blocks that both begin with, of which the first is known to be equal.
std::size_t common(std::span<const std::uint64_t> one, std::span<const std::uint64_t> other) {
  std::size_t equal = 1, different = std::min(one.size(), other.size()) + 1;
  while (different - equal > 1) {
    const std::size_t middle = equal + (different - equal) / 2;
    (one[middle - 1] == other[middle - 1] ? equal : different) = middle;
  }
  return equal;
}

}  // namespace

std::uint64_t Residents::begin(std::uint32_t row, std::int64_t block_size, std::span<const std::uint64_t> hashes,
                               double now_s) {
  const std::lock_guard lock(mutex_);
  if (row >= tokens_.size()) tokens_.resize(std::max<std::size_t>(row + 1, tokens_.size() * 2));
  std::uint32_t end = kNowhere;
  std::uint32_t above = make_root(block_size);
  std::size_t depth = 0;
  while (depth < hashes.size()) {
    const auto rest = hashes.subspan(depth);
    end = child(above, rest[0]);
    if (end == kNowhere) {
      end = make_node(above, block_size, rest);
    } else if (const std::size_t blocks = common(nodes_[end].run, rest); blocks < nodes_[end].run.size()) {
      divide(end, blocks);
      end = nodes_[end].parent;
    }
    enter(end, row, now_s);
    depth += nodes_[end].run.size();
    above = end;
  }
  prompts_[next_id_] = {end, row};
  return next_id_++;
}

bool Residents::end(std::uint64_t id) {
  const std::lock_guard lock(mutex_);
  const Prompt* found = prompts_.find(id);
  if (found == nullptr) return false;
  const Prompt prompt = *found;
  prompts_.erase(id);
  for (std::uint32_t node = prompt.node; node < kRoots;) {
    const std::uint32_t parent = nodes_[node].parent;
    leave(node, prompt.row);
    node = parent;
  }
  return true;
}

std::size_t Residents::prompts() const {
  const std::lock_guard lock(mutex_);
  return prompts_.size();
}

std::size_t Residents::nodes() const {
  const std::lock_guard lock(mutex_);
  return nodes_.size() - free_.size();
}

void Residents::Reading::leading(std::int64_t block_size, std::span<const std::uint64_t> hashes, double since_s,
                                 std::vector<Leading>& found) const {
  found.assign(residents_.tokens_.size(), {});
  std::uint32_t above = residents_.root(block_size);
  for (std::size_t depth = 0; above != kNowhere && depth < hashes.size();) {
    const auto rest = hashes.subspan(depth);
    const std::uint32_t number = residents_.child(above, rest[0]);
    if (number == kNowhere) return;
    const Node& node = residents_.nodes_[number];
    const std::size_t blocks = common(node.run, rest);
    depth += blocks;
    for (const Count& count : node.rows) {
      Leading& there = found[count.row];
      there.shared = static_cast<std::uint32_t>(depth);
      if (count.newest_s >= since_s) there.recent = there.shared;
    }
    if (blocks < node.run.size()) return;
    above = number;
  }
}

std::uint32_t Residents::root(std::int64_t block_size) const {
  const auto found = std::ranges::find(sizes_, block_size);
  return found == sizes_.end() ? kNowhere : kRoots + static_cast<std::uint32_t>(found - sizes_.begin());
}

std::uint32_t Residents::make_root(std::int64_t block_size) {
  if (root(block_size) == kNowhere) sizes_.push_back(block_size);
  return root(block_size);
}

std::uint32_t Residents::child(std::uint32_t parent, std::uint64_t first) const {
  const std::uint32_t* found = branches_.find({parent, first});
  return found == nullptr ? kNowhere : *found;
}

std::uint32_t Residents::make_node(std::uint32_t parent, std::int64_t block_size,
                                   std::span<const std::uint64_t> run) {
  auto number = static_cast<std::uint32_t>(nodes_.size());
  if (free_.empty()) {
    nodes_.emplace_back();
  } else {
    number = free_.back();
    free_.pop_back();
  }
  nodes_[number] = {parent, block_size, {run.begin(), run.end()}, {}};
  branches_[{parent, run[0]}] = number;
  return number;
}

// The first blocks of a node become one of its own above it. The number stays with the lower part: prompts that end
// with the run still do.
void Residents::divide(std::uint32_t lower, std::size_t blocks) {
  const std::vector<std::uint64_t> run = std::move(nodes_[lower].run);
  const std::span<const std::uint64_t> all(run);
  const std::uint32_t upper = make_node(nodes_[lower].parent, nodes_[lower].block_size, all.first(blocks));
  nodes_[upper].rows = nodes_[lower].rows;
  nodes_[lower].parent = upper;
  nodes_[lower].run.assign(run.begin() + static_cast<std::ptrdiff_t>(blocks), run.end());
  branches_[{upper, run[blocks]}] = lower;
}

void Residents::enter(std::uint32_t number, std::uint32_t row, double now_s) {
  Node& node = nodes_[number];
  const auto place = std::ranges::lower_bound(node.rows, row, {}, &Count::row);
  if (place != node.rows.end() && place->row == row) {
    ++place->prompts;
    place->newest_s = std::max(place->newest_s, now_s);
    return;
  }
  node.rows.insert(place, {row, 1, now_s});
  tokens_[row] += static_cast<std::int64_t>(node.run.size()) * node.block_size;
}

void Residents::leave(std::uint32_t number, std::uint32_t row) {
  Node& node = nodes_[number];
  const auto place = std::ranges::lower_bound(node.rows, row, {}, &Count::row);
  if (--place->prompts != 0) return;
  node.rows.erase(place);
  tokens_[row] -= static_cast<std::int64_t>(node.run.size()) * node.block_size;
  if (!node.rows.empty()) return;
  branches_.erase({node.parent, node.run[0]});
  node = {};
  free_.push_back(number);
}

}  // namespace pointsman
