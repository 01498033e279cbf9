// SPDX-License-Identifier: Apache-2.0
#include "plain_query.hpp"

#include <algorithm>
#include <bit>
#include <cstring>

namespace pointsman {
namespace {

bool is_space(char c) { return c == ' ' || c == '\n' || c == '\r' || c == '\t'; }
bool is_digit(char c) { return c >= '0' && c <= '9'; }

// A cursor over JSON text of the plain form.
class Reader {
 public:
  explicit Reader(std::string_view text) : p_(text.data()), end_(text.data() + text.size()) {}

  [[nodiscard]] bool at_end() {
    skip_space();
    return p_ == end_;
  }

  // True and consumed when `c` comes next, after white space.
  bool take(char c) {
    skip_space();
    if (p_ == end_ || *p_ != c) return false;
    ++p_;
    return true;
  }

  bool take_null() {
    skip_space();
    if (end_ - p_ < 4 || std::memcmp(p_, "null", 4) != 0) return false;
    p_ += 4;
    return true;
  }

  bool text(std::string_view& out) {
    if (!take('"')) return false;
    const char* start = p_;
    while (p_ != end_ && *p_ != '"') {
      if (*p_ < 0x20 || *p_ > 0x7e || *p_ == '\\') return false;
      ++p_;
    }
    if (p_ == end_) return false;
    out = {start, static_cast<std::size_t>(p_ - start)};
    ++p_;
    return true;
  }

  bool tokens(std::vector<std::uint32_t>& out) {
    if (!take('[')) return false;
    out.clear();
    out.reserve(static_cast<std::size_t>(end_ - p_) / 2 + 1);  // a token takes two bytes at least
    if (take(']')) return true;
    for (;;) {
      skip_space();
      std::uint32_t token = 0;
      if (!(short_number(token) || number(token))) return false;
      out.push_back(token);
      if (p_ != end_ && *p_ == ',') {
        ++p_;
        continue;
      }
      if (take(']')) return true;
      if (!take(',')) return false;
    }
  }

 private:
  void skip_space() {
    while (p_ != end_ && is_space(*p_)) ++p_;
  }

  // Up to seven digits at once, eight bytes in a register; false, and nothing consumed, for anything else.
  bool short_number(std::uint32_t& out) {
    if constexpr (std::endian::native != std::endian::little) return false;
    if (end_ - p_ < 8) return false;
    std::uint64_t bytes = 0;
    std::memcpy(&bytes, p_, 8);
    const std::uint64_t nibbles = bytes ^ 0x3030303030303030ULL;  // a digit becomes its value
    // The high half of a byte is set for anything but 0 to 9. Carries only go into bytes behind the first such byte.
    const std::uint64_t others = ((nibbles + 0x0606060606060606ULL) | nibbles) & 0xf0f0f0f0f0f0f0f0ULL;
    const int digits = std::countr_zero(others) / 8;  // 8 where all are
    if (digits == 0 || digits == 8 || (*p_ == '0' && digits != 1)) return false;
    std::uint64_t value = nibbles << (64 - 8 * digits);  // zeros in front
    value = value * 10 + (value >> 8);                   // pairs of digits in every other byte
    value = ((value & 0x000000ff000000ffULL) * 0x000f424000000064ULL +
             (value >> 16 & 0x000000ff000000ffULL) * 0x0000271000000001ULL) >>
            32;
    out = static_cast<std::uint32_t>(value);
    p_ += digits;
    return true;
  }

  bool number(std::uint32_t& out) {
    const char* start = p_;
    std::uint64_t value = 0;
    while (p_ != end_ && is_digit(*p_) && p_ - start < 11) value = value * 10 + static_cast<std::uint64_t>(*p_++ - '0');
    const auto digits = p_ - start;
    if (digits == 0 || value > 0xffffffff || (digits > 1 && *start == '0')) return false;
    out = static_cast<std::uint32_t>(value);
    return true;
  }

  const char* p_;
  const char* end_;
};

enum Seen : unsigned { kTokens = 1, kModel = 2, kTenant = 4, kLora = 8, kSalt = 16 };

// A header's line without its end, from `line`.
bool known_header(std::string_view line, std::optional<std::size_t>& content_length) {
  const std::size_t colon = line.find(':');
  if (colon == std::string_view::npos || colon == 0) return false;
  char name[24];
  for (std::size_t i = 0; i < colon; ++i) {
    const char c = line[i];
    const char lower = c >= 'A' && c <= 'Z' ? static_cast<char>(c - 'A' + 'a') : c;
    if (!(lower >= 'a' && lower <= 'z') && !is_digit(c) && c != '-' && c != '_') return false;
    if (i < sizeof name) name[i] = lower;
  }
  std::string_view value = line.substr(colon + 1);
  if (!std::ranges::all_of(value, [](char c) { return c >= 0x20 && c <= 0x7e; })) return false;
  if (value.starts_with(' ')) value.remove_prefix(1);
  if (colon > sizeof name) return true;
  const std::string_view lower(name, colon);
  if (lower == "content-length") {
    if (content_length || value.empty() || value.size() > 7 || !std::ranges::all_of(value, is_digit)) return false;
    std::size_t length = 0;
    for (const char c : value) length = length * 10 + static_cast<std::size_t>(c - '0');
    content_length = length;
    return length <= kMaxPlainBodyBytes;
  }
  if (lower == "connection") return value == "keep-alive" || value == "Keep-Alive";
  return lower != "transfer-encoding" && lower != "expect" && lower != "upgrade" && lower != "trailer" && lower != "te";
}

}  // namespace

bool read_plain_query(std::string_view body, PlainQuery& query) {
  query.model = query.tenant = query.lora = query.salt = {};
  unsigned seen = 0;
  Reader reader(body);
  if (!reader.take('{')) return false;
  do {
    std::string_view name;
    if (!reader.text(name) || !reader.take(':')) return false;
    unsigned field = 0;
    std::string_view* into = nullptr;
    if (name == "token_ids") {
      field = kTokens;
    } else if (name == "model_name") {
      field = kModel, into = &query.model;
    } else if (name == "tenant_id" || name == "routing_group") {
      field = kTenant, into = &query.tenant;  // two names of one field: with both it is not plain
    } else if (name == "lora_name") {
      field = kLora, into = &query.lora;
    } else if (name == "cache_salt") {
      field = kSalt, into = &query.salt;
    } else {
      return false;
    }
    if ((seen & field) != 0) return false;
    seen |= field;
    if (into == nullptr) {
      if (!reader.tokens(query.tokens)) return false;
    } else if (field == kModel || !reader.take_null()) {
      if (!reader.text(*into)) return false;
      if (into->empty() && (field == kModel || field == kTenant)) return false;
    }
  } while (reader.take(','));
  return reader.take('}') && reader.at_end() && (seen & kTokens) != 0 && (seen & kModel) != 0;
}

HeadState read_plain_head(std::string_view request, PlainHead& head) {
  constexpr std::string_view kStart = "POST /query HTTP/1.1\r\n";
  if (!request.starts_with(kStart.substr(0, request.size()))) return HeadState::other;
  if (request.size() < kStart.size()) return HeadState::unfinished;
  std::optional<std::size_t> content_length;
  std::size_t at = kStart.size();
  for (;;) {
    const std::string_view rest = request.substr(at, kMaxHeadBytes);
    const std::size_t end = rest.find('\r');
    if (at > kMaxHeadBytes) return HeadState::other;
    if (end == std::string_view::npos || end + 1 == rest.size()) {
      return at + rest.size() < kMaxHeadBytes ? HeadState::unfinished : HeadState::other;
    }
    if (rest[end + 1] != '\n') return HeadState::other;
    at += end + 2;
    if (end == 0) break;
    if (!known_header(rest.substr(0, end), content_length)) return HeadState::other;
  }
  if (!content_length) return HeadState::other;
  head = {at, *content_length};
  return HeadState::whole;
}

}  // namespace pointsman
