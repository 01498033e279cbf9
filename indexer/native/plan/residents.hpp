// SPDX-License-Identifier: Apache-2.0
// The prompts in flight at each rank, as a prefix tree of runs of block hashes.
//
// The same as the reference in router/plan/residents.py. A hash stands for its block and all before it, so two prompts
// that are equal at some depth are equal before, and where they part is found by bisection. Nodes are runs of blocks
// that the same requests go through; one is divided where another prompt parts from it, and goes with its last
// request. Rows are those of the load board. Trees of different block sizes have nothing in common.
//
// Cost of begin and end: O(nodes on the path x (log run + rows of the node)), and the copy of a new tail or of a divided
// run. Of leading: O(nodes on the path x log run + rows of the last node + prompts that part from the path), where those
// are fewer than rows. Locked.
#pragma once

#include <cstdint>
#include <limits>
#include <mutex>
#include <span>
#include <utility>
#include <vector>

#include "../flat_map.hpp"
#include "../mix.hpp"

namespace pointsman {

class Residents {
 public:
  // Leading blocks of a prompt that a rank has in flight, and when the last request with all of them was, or will be,
  // scheduled.
  struct Leading {
    std::uint32_t shared = 0;
    double ready_s = -std::numeric_limits<double>::infinity();
  };

  // A prompt is at the rank from now on; returns the number to end it by. `ready_s`: when those sent
  // behind it will find its blocks; minus infinity: they will not.
  std::uint64_t begin(std::uint32_t row, std::int64_t block_size, std::span<const std::uint64_t> hashes, double ready_s);
  // It is gone; false where no such prompt is there.
  bool end(std::uint64_t id);

  [[nodiscard]] std::size_t prompts() const;
  [[nodiscard]] std::size_t nodes() const;

  // What is there at one moment; nothing changes while it lives.
  class Reading {
   public:
    explicit Reading(const Residents& residents) : residents_(residents), lock_(residents.mutex_) {}

    // By row, what is in flight there of a prompt; `found` is overwritten, and rows behind its end share nothing.
    void leading(std::int64_t block_size, std::span<const std::uint64_t> hashes, std::vector<Leading>& found) const;
    // Distinct prompt tokens in flight at the rank.
    [[nodiscard]] std::int64_t tokens(std::uint32_t row) const {
      return row < residents_.tokens_.size() ? residents_.tokens_[row] : 0;
    }

   private:
    const Residents& residents_;
    std::lock_guard<std::mutex> lock_;
  };

 private:
  static constexpr std::uint32_t kNowhere = 0xffffffff;
  static constexpr std::uint32_t kRoots = 0x80000000;  // and above: a root for each block size

  struct Count {
    std::uint32_t row;
    std::uint32_t prompts;
    double ready_s;  // the latest since the row came; never later than of the node above
  };
  struct Node {
    std::uint32_t parent = kNowhere;
    std::int64_t block_size = 0;
    std::vector<std::uint64_t> run;
    std::vector<Count> rows;    // by row, of all prompts that go through it
    std::vector<Count> ending;  // of them those that end with it
    std::vector<std::uint32_t> children;
    std::size_t listed = 0;   // rows of all children
    std::uint32_t place = 0;  // among the children of the parent
  };
  struct Branch {
    std::uint32_t parent = kNowhere;
    std::uint64_t first = 0;  // hash of the first block of the run
    bool operator==(const Branch&) const = default;
  };
  struct BranchHash {
    std::size_t operator()(const Branch& branch) const noexcept { return mix64(branch.first + branch.parent); }
  };
  struct IdHash {
    std::size_t operator()(std::uint64_t id) const noexcept { return mix64(id); }
  };
  struct Prompt {
    std::uint32_t node = kNowhere;  // where it ends, at the end of the run
    std::uint32_t row = 0;
  };

  [[nodiscard]] std::uint32_t root(std::int64_t block_size) const;
  std::uint32_t make_root(std::int64_t block_size);
  [[nodiscard]] std::uint32_t child(std::uint32_t parent, std::uint64_t first) const;
  std::uint32_t make_node(std::uint32_t parent, std::int64_t block_size, std::span<const std::uint64_t> run);
  void divide(std::uint32_t lower, std::size_t blocks);
  [[nodiscard]] static bool add(std::vector<Count>& rows, std::uint32_t row, double ready_s);
  [[nodiscard]] static bool take(std::vector<Count>& rows, std::uint32_t row);
  void adopt(std::uint32_t parent, std::uint32_t child);
  [[nodiscard]] static const Count* find(const std::vector<Count>& rows, std::uint32_t row);
  void enter(std::uint32_t node, std::uint32_t row, double ready_s);
  void leave(std::uint32_t node, std::uint32_t row);

  std::vector<Node> nodes_;
  std::vector<std::uint32_t> free_;
  std::vector<std::int64_t> sizes_;  // of the roots; few, and never forgotten
  FlatMap<Branch, std::uint32_t, BranchHash> branches_;
  FlatMap<std::uint64_t, Prompt, IdHash> prompts_;
  std::vector<std::int64_t> tokens_;  // by row
  std::uint64_t next_id_ = 0;
  mutable std::mutex mutex_;
};

}  // namespace pointsman
