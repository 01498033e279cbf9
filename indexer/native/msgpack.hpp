// SPDX-License-Identifier: Apache-2.0
// A bounded reader of msgpack (specification: github.com/msgpack/msgpack, spec.md) over bytes from the network.
//
// Every read checks what is left; a failed read leaves the cursor where it was or anywhere inside the
// buffer, never outside. Declared lengths are never trusted for allocation. Nesting is skipped without
// recursion, by counting the values still owed, so depth costs nothing.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string_view>

namespace pointsman {

class MsgpackReader {
 public:
  MsgpackReader() noexcept = default;
  MsgpackReader(const std::uint8_t* data, std::size_t size) noexcept : p_(data), end_(data + size) {}

  [[nodiscard]] bool at_end() const noexcept { return p_ == end_; }
  [[nodiscard]] const std::uint8_t* position() const noexcept { return p_; }
  void rewind(const std::uint8_t* position) noexcept { p_ = position; }
  [[nodiscard]] std::size_t left() const noexcept { return static_cast<std::size_t>(end_ - p_); }

  // True and consumed when the next value is nil.
  bool nil() noexcept {
    if (p_ == end_ || *p_ != 0xc0) return false;
    ++p_;
    return true;
  }

  bool array(std::uint32_t& count) noexcept { return container(0x90, 0xdc, count); }
  bool map(std::uint32_t& count) noexcept { return container(0x80, 0xde, count); }

  [[nodiscard]] bool next_is_array() const noexcept {
    return p_ != end_ && ((*p_ & 0xf0) == 0x90 || *p_ == 0xdc || *p_ == 0xdd);
  }
  [[nodiscard]] bool next_is_map() const noexcept {
    return p_ != end_ && ((*p_ & 0xf0) == 0x80 || *p_ == 0xde || *p_ == 0xdf);
  }
  [[nodiscard]] bool next_is_string() const noexcept {
    return p_ != end_ && ((*p_ & 0xe0) == 0xa0 || (*p_ >= 0xd9 && *p_ <= 0xdb));
  }
  [[nodiscard]] bool next_is_binary() const noexcept { return p_ != end_ && *p_ >= 0xc4 && *p_ <= 0xc6; }
  [[nodiscard]] bool next_is_integer() const noexcept {
    return p_ != end_ && (*p_ <= 0x7f || *p_ >= 0xe0 || (*p_ >= 0xcc && *p_ <= 0xd3));
  }

  // An integer as 64 bits of two's complement; `negative` tells which half of the range it came from.
  bool integer(std::uint64_t& bits, bool& negative) noexcept {
    if (p_ == end_) return false;
    const std::uint8_t tag = *p_;
    negative = false;
    if (tag <= 0x7f) {
      bits = tag;
      ++p_;
      return true;
    }
    if (tag >= 0xe0) {
      bits = static_cast<std::uint64_t>(static_cast<std::int64_t>(static_cast<std::int8_t>(tag)));
      negative = true;
      ++p_;
      return true;
    }
    if (tag >= 0xcc && tag <= 0xcf) return big_endian(std::size_t{1} << (tag - 0xcc), bits);
    if (tag >= 0xd0 && tag <= 0xd3) {
      const std::size_t width = std::size_t{1} << (tag - 0xd0);
      if (!big_endian(width, bits)) return false;
      const unsigned shift = static_cast<unsigned>(64 - 8 * width);
      const auto value = static_cast<std::int64_t>(bits << shift) >> shift;
      negative = value < 0;
      bits = static_cast<std::uint64_t>(value);
      return true;
    }
    return false;
  }

  bool unsigned_integer(std::uint64_t& value) noexcept {
    const std::uint8_t* start = p_;
    bool negative = false;
    if (integer(value, negative) && !negative) return true;
    p_ = start;
    return false;
  }

  // Reads `count` integers of at most 32 bits. The width of each is computed rather than branched on: which of them a
  // token takes cannot be predicted.
  bool unsigned_words(std::uint32_t* out, std::size_t count) noexcept {
    for (std::size_t i = 0; i < count; ++i) {
      std::uint64_t value = 0;
      const std::uint8_t tag = p_ == end_ ? 0 : *p_;
      const bool narrow = tag <= 0x7f;
      if (left() < 8 || !(narrow || (tag >= 0xcc && tag <= 0xce))) {
        if (!unsigned_integer(value) || value > 0xffffffff) return false;
        out[i] = static_cast<std::uint32_t>(value);
        continue;
      }
      std::memcpy(&value, p_, 8);
      value = __builtin_bswap64(value);
      const unsigned width = narrow ? 0U : 1U << (tag & 3U);
      const std::uint64_t wide = value << 8 >> ((64 - 8 * width) & 63U);
      out[i] = static_cast<std::uint32_t>(narrow ? std::uint64_t{tag} : wide);
      p_ += 1 + width;
    }
    return true;
  }

  bool string(std::string_view& out) noexcept {
    if (p_ == end_) return false;
    if ((*p_ & 0xe0) == 0xa0) return bytes(1, *p_ & 0x1f, out);
    if (*p_ >= 0xd9 && *p_ <= 0xdb) return sized(std::size_t{1} << (*p_ - 0xd9), out);
    return false;
  }

  bool binary(std::string_view& out) noexcept {
    if (!next_is_binary()) return false;
    return sized(std::size_t{1} << (*p_ - 0xc4), out);
  }

  // Skips one value of any kind, however deep. False when it runs past the end or is not msgpack.
  bool skip() noexcept {
    std::uint64_t owed = 1;
    while (owed != 0) {
      --owed;
      if (p_ == end_) return false;
      const std::uint8_t tag = *p_;
      std::uint32_t count = 0;
      std::string_view ignored;
      if (next_is_array()) {
        if (!array(count)) return false;
        owed += count;
      } else if (next_is_map()) {
        if (!map(count)) return false;
        owed += 2 * std::uint64_t{count};
      } else if (next_is_string()) {
        if (!string(ignored)) return false;
      } else if (next_is_binary()) {
        if (!binary(ignored)) return false;
      } else if (next_is_integer()) {
        std::uint64_t bits = 0;
        bool negative = false;
        if (!integer(bits, negative)) return false;
      } else if (tag == 0xc0 || tag == 0xc2 || tag == 0xc3) {
        ++p_;
      } else if (tag == 0xca || tag == 0xcb) {
        if (!advance(tag == 0xca ? 5 : 9)) return false;
      } else if (tag >= 0xd4 && tag <= 0xd8) {  // fixext 1, 2, 4, 8, 16: tag, type, data
        if (!advance(2 + (std::size_t{1} << (tag - 0xd4)))) return false;
      } else if (tag >= 0xc7 && tag <= 0xc9) {  // ext 8, 16, 32: tag, length, type, data
        const std::size_t width = std::size_t{1} << (tag - 0xc7);
        std::uint64_t size = 0;
        if (!big_endian(width, size) || size + 1 > left()) return false;
        p_ += size + 1;
      } else {
        return false;
      }
      // A value takes at least a byte, so a count beyond what is left is a lie.
      if (owed > left()) return false;
    }
    return true;
  }

 private:
  bool advance(std::size_t size) noexcept {
    if (size > left()) return false;
    p_ += size;
    return true;
  }

  // Reads `width` big-endian bytes after the tag and moves past both.
  bool big_endian(std::size_t width, std::uint64_t& out) noexcept {
    if (left() < 1 + width) return false;
    std::uint64_t value = 0;
    for (std::size_t i = 0; i < width; ++i) value = value << 8 | p_[1 + i];
    out = value;
    p_ += 1 + width;
    return true;
  }

  bool bytes(std::size_t header, std::size_t size, std::string_view& out) noexcept {
    if (left() < header + size) return false;
    out = {reinterpret_cast<const char*>(p_ + header), size};
    p_ += header + size;
    return true;
  }

  bool sized(std::size_t width, std::string_view& out) noexcept {
    const std::uint8_t* start = p_;
    std::uint64_t size = 0;
    if (big_endian(width, size) && bytes(0, size, out)) return true;
    p_ = start;
    return false;
  }

  bool container(std::uint8_t fixed, std::uint8_t wide, std::uint32_t& count) noexcept {
    if (p_ == end_) return false;
    if ((*p_ & 0xf0) == fixed) {
      count = *p_++ & 0x0f;
      return true;
    }
    if (*p_ != wide && *p_ != wide + 1) return false;
    std::uint64_t value = 0;
    if (!big_endian(*p_ == wide ? 2 : 4, value)) return false;
    count = static_cast<std::uint32_t>(value);
    return true;
  }

  const std::uint8_t* p_ = nullptr;
  const std::uint8_t* end_ = nullptr;
};

}  // namespace pointsman
