// SPDX-License-Identifier: Apache-2.0
// The index of another process, attached by its path: it answers without a lock and without asking that process.
//
// A writer that dies leaves its file as it was, and answers go on coming from it. When another file stands at the
// path, the reader moves to it by itself, between two answers. Slot numbers of one file mean nothing in another:
// `generation` tells them apart.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "hash_chain.hpp"
#include "mapping.hpp"
#include "view.hpp"

namespace pointsman {

class IndexReader {
 public:
  // Throws std::system_error where there is no file, std::invalid_argument where it is no index of this key.
  IndexReader(const std::string& path, HashKey key);

  // See IndexView::match. The generation of the slots named.
  std::uint64_t match(std::span<const std::uint64_t> hashes, std::vector<Run>& runs, double now_s);
  [[nodiscard]] std::optional<SlotEntry> slot(SlotId slot) { return current()->view.slot(slot); }
  // The live slots, and their generation.
  [[nodiscard]] std::pair<std::uint64_t, std::vector<SlotEntry>> slots();
  [[nodiscard]] std::uint64_t version();
  [[nodiscard]] std::uint64_t distinct_blocks();
  // Grows by one when the reader moves to another file.
  [[nodiscard]] std::uint64_t generation() { return current()->generation; }
  // Looks whether another file stands at the path, and moves to it. Happens by itself when the new writer says so in
  // the old file, and every now and then. One system call.
  void refresh();
  [[nodiscard]] const HashChain& chain() const { return chain_; }

 private:
  struct Attached {
    Attached(const std::string& path, std::uint64_t key_id, std::uint64_t number);
    Mapping region;
    Mapping nodes;  // that part once more, to leave marks in, where this process may
    std::uint64_t generation;
    IndexView view;
  };
  std::shared_ptr<const Attached> current();
  void move();

  std::string path_;
  HashChain chain_;
  std::mutex mutex_;  // of `attached_`, within this process
  std::shared_ptr<const Attached> attached_;
  std::atomic<std::uint32_t> asked_ = 0;
};

}  // namespace pointsman
