// SPDX-License-Identifier: Apache-2.0
#include "hash_chain.hpp"

namespace pointsman {

std::uint64_t HashChain::root(std::string_view model, std::string_view lora) const {
  SipHash hash(key_);
  hash.add("namespace", 9);
  hash.add_u64(model.size());
  hash.add(model.data(), model.size());
  hash.add_u64(lora.size());
  hash.add(lora.data(), lora.size());
  return hash.finish();
}

std::uint64_t HashChain::next(std::uint64_t parent, std::span<const std::uint32_t> tokens,
                              std::span<const std::uint8_t> extra) const {
  SipHash hash(key_);
  hash.add_u64(parent);
  hash.add_u64(tokens.size());
  hash.add(tokens.data(), tokens.size_bytes());
  if (!extra.empty()) hash.add(extra.data(), extra.size());
  return hash.finish();
}

void HashChain::blocks(std::uint64_t root, std::span<const std::uint32_t> tokens, std::size_t block_size,
                       std::span<const std::uint8_t> first_extra, std::vector<std::uint64_t>& hashes) const {
  std::uint64_t parent = root;
  std::span<const std::uint8_t> extra = first_extra;
  for (; tokens.size() >= block_size; tokens = tokens.subspan(block_size)) {
    parent = next(parent, tokens.first(block_size), extra);
    hashes.push_back(parent);
    extra = {};
  }
}

std::uint64_t HashChain::key_id() const {
  SipHash hash(key_);
  hash.add("index region", 12);
  return hash.finish();
}

}  // namespace pointsman
