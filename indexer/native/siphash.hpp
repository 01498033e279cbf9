// SPDX-License-Identifier: Apache-2.0
// SipHash, 64-bit output (Aumasson and Bernstein, "SipHash: a fast short-input PRF", 2012): 2-4 for block hashes, and
// 1-3 for what stays in this process.
//
// A keyed PRF: without the key, a hash says nothing about the tokens behind it, and nobody can make two
// prompts collide on purpose. The stream form hashes a message given in pieces; pieces are concatenated,
// so callers put lengths where two messages could otherwise read the same.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>

namespace pointsman {

static_assert(std::endian::native == std::endian::little, "message words are read little-endian");

struct HashKey {
  std::uint64_t k0 = 0;
  std::uint64_t k1 = 0;
};

template <int kCompress, int kFinish>
class SipHashOf {
 public:
  explicit SipHashOf(HashKey key) noexcept
      : v0_(key.k0 ^ 0x736f6d6570736575ULL),
        v1_(key.k1 ^ 0x646f72616e646f6dULL),
        v2_(key.k0 ^ 0x6c7967656e657261ULL),
        v3_(key.k1 ^ 0x7465646279746573ULL) {}

  void add(const void* data, std::size_t size) noexcept {
    const auto* p = static_cast<const unsigned char*>(data);
    total_ += size;
    if (fill_ != 0) {
      while (fill_ < 8 && size != 0) {
        tail_ |= std::uint64_t{*p++} << (8 * fill_++);
        --size;
      }
      if (fill_ < 8) return;
      compress(tail_);
      tail_ = 0;
      fill_ = 0;
    }
    for (; size >= 8; p += 8, size -= 8) {
      std::uint64_t word;
      std::memcpy(&word, p, 8);
      compress(word);
    }
    for (; size != 0; --size) tail_ |= std::uint64_t{*p++} << (8 * fill_++);
  }

  void add_u64(std::uint64_t value) noexcept { add(&value, sizeof value); }
  void add_u32(std::uint32_t value) noexcept { add(&value, sizeof value); }

  [[nodiscard]] std::uint64_t finish() noexcept {
    compress(tail_ | (std::uint64_t{total_ & 0xff} << 56));
    v2_ ^= 0xff;
    for (int i = 0; i < kFinish; ++i) round();
    return v0_ ^ v1_ ^ v2_ ^ v3_;
  }

 private:
  void round() noexcept {
    v0_ += v1_;
    v1_ = std::rotl(v1_, 13) ^ v0_;
    v0_ = std::rotl(v0_, 32);
    v2_ += v3_;
    v3_ = std::rotl(v3_, 16) ^ v2_;
    v0_ += v3_;
    v3_ = std::rotl(v3_, 21) ^ v0_;
    v2_ += v1_;
    v1_ = std::rotl(v1_, 17) ^ v2_;
    v2_ = std::rotl(v2_, 32);
  }

  void compress(std::uint64_t word) noexcept {
    v3_ ^= word;
    for (int i = 0; i < kCompress; ++i) round();
    v0_ ^= word;
  }

  std::uint64_t v0_, v1_, v2_, v3_;
  std::uint64_t tail_ = 0;
  std::size_t fill_ = 0;
  std::size_t total_ = 0;
};

using SipHash = SipHashOf<2, 4>;
using ShortSipHash = SipHashOf<1, 3>;

}  // namespace pointsman
