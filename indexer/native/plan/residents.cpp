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
                               double ready_s) {
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
      adopt(above, end);
    } else if (const std::size_t blocks = common(nodes_[end].run, rest); blocks < nodes_[end].run.size()) {
      divide(end, blocks);
      end = nodes_[end].parent;
    }
    enter(end, row, ready_s);
    depth += nodes_[end].run.size();
    above = end;
  }
  if (end != kNowhere) static_cast<void>(add(nodes_[end].ending, row, ready_s));
  prompts_[next_id_] = {end, row};
  return next_id_++;
}

bool Residents::end(std::uint64_t id) {
  const std::lock_guard lock(mutex_);
  const Prompt* found = prompts_.find(id);
  if (found == nullptr) return false;
  const Prompt prompt = *found;
  prompts_.erase(id);
  if (prompt.node != kNowhere) static_cast<void>(take(nodes_[prompt.node].ending, prompt.row));
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

// Whoever goes through a node of the path has its depth in common, if not that of a later one: so besides the rows of
// the last node only those count that leave the path, by another child or because their prompt ends.
void Residents::Reading::leading(std::int64_t block_size, std::span<const std::uint64_t> hashes,
                                 std::vector<Leading>& found) const {
  found.assign(residents_.tokens_.size(), {});
  const std::vector<Node>& nodes = residents_.nodes_;
  std::uint32_t above = residents_.root(block_size);
  if (above == kNowhere) return;
  std::uint32_t here = 0;  // blocks in common with the node above
  const auto set = [&](const Node& node, const std::vector<Count>& rows) {
    for (const Count& count : rows) {
      found[count.row] = {here, &rows == &node.rows ? count.ready_s : find(node.rows, count.row)->ready_s};
    }
  };
  for (std::size_t depth = 0; depth < hashes.size();) {
    const auto rest = hashes.subspan(depth);
    const std::uint32_t number = residents_.child(above, rest[0]);
    if (number == kNowhere) break;
    const Node& node = nodes[number];
    if (depth != 0) {
      const Node& parent = nodes[above];
      const std::size_t leaving = parent.listed - node.rows.size() + parent.ending.size();
      if (leaving + 2 * parent.children.size() > parent.rows.size()) {
        set(parent, parent.rows);
      } else {
        for (const std::uint32_t other : parent.children) {
          if (other != number) set(parent, nodes[other].rows);
        }
        set(parent, parent.ending);
      }
    }
    const std::size_t blocks = common(node.run, rest);
    depth += blocks;
    here = static_cast<std::uint32_t>(depth);
    above = number;
    if (blocks < node.run.size()) break;
  }
  if (here != 0) set(nodes[above], nodes[above].rows);
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
  Node& node = nodes_[number];
  node.parent = parent;
  node.block_size = block_size;
  node.run.assign(run.begin(), run.end());
  branches_[{parent, run[0]}] = number;
  return number;
}

void Residents::adopt(std::uint32_t parent, std::uint32_t child) {
  nodes_[child].parent = parent;
  if (parent >= kRoots) return;
  Node& above = nodes_[parent];
  nodes_[child].place = static_cast<std::uint32_t>(above.children.size());
  above.children.push_back(child);
  above.listed += nodes_[child].rows.size();
}

// The first blocks of a node become one of its own above it. The number stays with the lower part: prompts that end
// with the run still do.
void Residents::divide(std::uint32_t lower, std::size_t blocks) {
  const std::vector<std::uint64_t> run = std::move(nodes_[lower].run);
  const std::span<const std::uint64_t> all(run);
  const std::uint32_t upper = make_node(nodes_[lower].parent, nodes_[lower].block_size, all.first(blocks));
  Node& above = nodes_[upper];
  Node& below = nodes_[lower];
  above.rows = below.rows;
  above.place = below.place;
  if (above.parent < kRoots) nodes_[above.parent].children[above.place] = upper;
  below.run.assign(run.begin() + static_cast<std::ptrdiff_t>(blocks), run.end());
  adopt(upper, lower);
  branches_[{upper, run[blocks]}] = lower;
}

// Whether the row is new there.
bool Residents::add(std::vector<Count>& rows, std::uint32_t row, double ready_s) {
  const auto place = std::ranges::lower_bound(rows, row, {}, &Count::row);
  if (place != rows.end() && place->row == row) {
    ++place->prompts;
    place->ready_s = std::max(place->ready_s, ready_s);
    return false;
  }
  rows.insert(place, {row, 1, ready_s});
  return true;
}

// Whether the row is gone from there.
bool Residents::take(std::vector<Count>& rows, std::uint32_t row) {
  const auto place = std::ranges::lower_bound(rows, row, {}, &Count::row);
  if (--place->prompts != 0) return false;
  rows.erase(place);
  return true;
}

// That of a row that is there.
const Residents::Count* Residents::find(const std::vector<Count>& rows, std::uint32_t row) {
  return &*std::ranges::lower_bound(rows, row, {}, &Count::row);
}

void Residents::enter(std::uint32_t number, std::uint32_t row, double ready_s) {
  Node& node = nodes_[number];
  if (!add(node.rows, row, ready_s)) return;
  if (node.parent < kRoots) ++nodes_[node.parent].listed;
  tokens_[row] += static_cast<std::int64_t>(node.run.size()) * node.block_size;
}

void Residents::leave(std::uint32_t number, std::uint32_t row) {
  Node& node = nodes_[number];
  if (!take(node.rows, row)) return;
  tokens_[row] -= static_cast<std::int64_t>(node.run.size()) * node.block_size;
  if (node.parent < kRoots) {
    Node& above = nodes_[node.parent];
    --above.listed;
    if (node.rows.empty()) {
      above.children[node.place] = above.children.back();
      nodes_[above.children[node.place]].place = node.place;
      above.children.pop_back();
    }
  }
  if (!node.rows.empty()) return;
  branches_.erase({node.parent, node.run[0]});
  node = {};
  free_.push_back(number);
}

}  // namespace pointsman
