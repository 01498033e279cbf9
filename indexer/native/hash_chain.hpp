// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

#include "siphash.hpp"

namespace pointsman {

// request hash of block i = SipHash(key; hash of block i-1, tokens, extra keys); block -1 is the namespace.
class HashChain {
 public:
  explicit HashChain(HashKey key) : key_(key) {}
  [[nodiscard]] std::uint64_t root(std::string_view model, std::string_view lora) const;
  [[nodiscard]] std::uint64_t next(std::uint64_t parent, std::span<const std::uint32_t> tokens,
                                   std::span<const std::uint8_t> extra) const;
  // Appends the hashes of the full blocks of a prompt; `first_extra` are the extra keys of its first block.
  void blocks(std::uint64_t root, std::span<const std::uint32_t> tokens, std::size_t block_size,
              std::span<const std::uint8_t> first_extra, std::vector<std::uint64_t>& hashes) const;
  // Says which key it is without saying anything about it.
  [[nodiscard]] std::uint64_t key_id() const;

 private:
  HashKey key_;
};

}  // namespace pointsman
