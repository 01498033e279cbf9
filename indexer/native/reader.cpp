// SPDX-License-Identifier: Apache-2.0
#include "reader.hpp"

#include <stdexcept>
#include <system_error>

#include "atomics.hpp"

namespace pointsman {
namespace {

constexpr std::uint32_t kQuestionsPerLook = 512;

Mapping attach_index(const std::string& path, std::uint64_t key_id) {
  Mapping region = Mapping::attach(path, Mapping::Access::read_only);
  const Header* header = region.at<Header>(0);
  if (region.size() < sizeof(Header) || header->magic != Header::kMagic || header->layout != Header::kLayout ||
      header->bytes != region.size()) {
    throw std::invalid_argument(path + " is not an index of this version");
  }
  if (header->key_id != key_id) throw std::invalid_argument(path + " was made with another hash key");
  return region;
}

Mapping attach_nodes(const Mapping& region) {
  const Header* header = region.at<Header>(0);
  try {
    return region.writable_part(header->nodes, header->holdings - header->nodes);
  } catch (const std::system_error&) {
    return {};  // read-only for this process: what it matches is not kept any longer for that
  }
}

}  // namespace

IndexReader::Attached::Attached(const std::string& path, std::uint64_t key_id, std::uint64_t number)
    : region(attach_index(path, key_id)),
      nodes(attach_nodes(region)),
      generation(number),
      view(region.data(), nodes.data()) {}

IndexReader::IndexReader(const std::string& path, HashKey key)
    : path_(path), chain_(key), attached_(std::make_shared<const Attached>(path, chain_.key_id(), 1)) {}

std::uint64_t IndexReader::match(std::span<const std::uint64_t> hashes, std::vector<Run>& runs, double now_s) {
  if (asked_.fetch_add(1, std::memory_order_relaxed) % kQuestionsPerLook == kQuestionsPerLook - 1) refresh();
  const auto attached = current();
  attached->view.match(hashes, runs, tick_of(now_s));
  return attached->generation;
}

std::pair<std::uint64_t, std::vector<SlotEntry>> IndexReader::slots() {
  const auto attached = current();
  return {attached->generation, attached->view.slots()};
}

std::uint64_t IndexReader::version() { return load(current()->view.header().version); }

std::uint64_t IndexReader::distinct_blocks() { return load(current()->view.header().distinct); }

std::shared_ptr<const IndexReader::Attached> IndexReader::current() {
  {
    const std::lock_guard lock(mutex_);
    if (load(attached_->view.header().superseded) == 0) return attached_;
  }
  move();
  const std::lock_guard lock(mutex_);
  return attached_;
}

void IndexReader::refresh() {
  bool replaced = false;
  {
    const std::lock_guard lock(mutex_);
    replaced = attached_->region.replaced();
  }
  if (replaced) move();
}

// Where the new file cannot be read the old one goes on answering.
void IndexReader::move() {
  const std::lock_guard lock(mutex_);
  if (!attached_->region.replaced()) return;
  try {
    attached_ = std::make_shared<const Attached>(path_, chain_.key_id(), attached_->generation + 1);
  } catch (const std::system_error&) {
  } catch (const std::invalid_argument&) {
  }
}

}  // namespace pointsman
