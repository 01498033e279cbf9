// SPDX-License-Identifier: Apache-2.0
#include "id_list.hpp"

#include <bit>
#include <cstring>
#include <limits>

namespace pointsman {

namespace {

const char* past_space(const char* at, const char* end) {
  while (at < end && (*at == ' ' || *at == '\n' || *at == '\t' || *at == '\r')) ++at;
  return at;
}

// Up to seven digits among the next eight bytes: their count, and their value. Each byte is looked at and multiplied
// at the same time as the others ("SIMD within a register"), so that lengths that vary cost no mispredicted branch.
std::size_t short_number(const char* at, std::uint64_t& value) {
  static_assert(std::endian::native == std::endian::little);
  std::uint64_t bytes;
  std::memcpy(&bytes, at, 8);
  constexpr std::uint64_t high = 0xF0F0F0F0F0F0F0F0, digits = 0x3030303030303030;
  const std::uint64_t above_nine = (bytes & 0x0F0F0F0F0F0F0F0F) + 0x0606060606060606;
  const std::uint64_t other = ((bytes & high) ^ digits) | (above_nine & high);
  const std::size_t length = other == 0 ? 8 : static_cast<std::size_t>(std::countr_zero(other)) / 8;
  if (length == 0 || length == 8) return length;
  std::uint64_t number = (bytes & 0x0F0F0F0F0F0F0F0F) << (8 * (8 - length));
  number = (number * 10 + (number >> 8)) & 0x00FF00FF00FF00FF;
  number = (number * 100 + (number >> 16)) & 0x0000FFFF0000FFFF;
  value = (number * 10000 + (number >> 32)) & 0xFFFFFFFF;
  return length;
}

const char* any_number(const char* at, const char* end, std::uint64_t& value) {
  const char* const begin = at;
  value = 0;
  for (; at < end && *at >= '0' && *at <= '9'; ++at) {
    value = value * 10 + static_cast<std::uint64_t>(*at - '0');
    if (value > std::numeric_limits<std::uint32_t>::max()) return begin;
  }
  return at;
}

}  // namespace

bool parse_ids(std::string_view text, std::vector<std::uint32_t>& ids) {
  const char* at = text.data();
  const char* const end = at + text.size();
  at = past_space(at, end);
  if (at == end || *at++ != '[') return false;
  at = past_space(at, end);
  if (at < end && *at == ']') return past_space(at + 1, end) == end;
  while (at < end) {
    const char* const begin = at;
    std::uint64_t value = 0;
    const std::size_t length = end - at >= 8 ? short_number(at, value) : 8;
    at = length < 8 ? at + length : any_number(at, end, value);
    if (at == begin || (*begin == '0' && at - begin > 1)) return false;
    ids.push_back(static_cast<std::uint32_t>(value));
    at = past_space(at, end);
    if (at == end) return false;
    const char mark = *at++;
    if (mark == ']') return past_space(at, end) == end;
    if (mark != ',') return false;
    at = past_space(at, end);
  }
  return false;
}

}  // namespace pointsman
