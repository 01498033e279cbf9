// SPDX-License-Identifier: Apache-2.0
// The plain case of POST /query: its HTTP head and its JSON body, read in one pass each.
//
// What most clients send has a narrow form. These readers take that form and nothing else; they refuse whatever is
// unusual, also where it is right, and the general reader decides about it (`indexer/service/http.py`, `requests.py`).
// So nothing here has to know what is an error.
//
//   head   POST /query HTTP/1.1, header lines, an empty line; one content-length, no transfer-encoding, expect or
//          upgrade, no connection but keep-alive; at most kMaxHeadBytes
//   body   {"token_ids": [0, 7, ...], "model_name": "m"} with any of tenant_id or routing_group, lora_name,
//          cache_salt; each at most once, null as if absent; tokens are decimal below 2^32, texts are printable ASCII
//          without escapes; JSON's white space anywhere
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string_view>
#include <vector>

namespace pointsman {

inline constexpr std::size_t kMaxHeadBytes = 8192;
inline constexpr std::size_t kMaxPlainBodyBytes = 4 * 1024 * 1024;

struct PlainQuery {
  std::vector<std::uint32_t> tokens;
  // Views into the body; empty: absent.
  std::string_view model;
  std::string_view tenant;
  std::string_view lora;
  std::string_view salt;
};

// False: not plain, and `query` holds anything. O(bytes).
[[nodiscard]] bool read_plain_query(std::string_view body, PlainQuery& query);

struct PlainHead {
  std::size_t head_bytes;  // with the empty line
  std::size_t body_bytes;
};

enum class HeadState : std::uint8_t { whole, unfinished, other };

// `unfinished`: what is there could be the beginning of a plain head.
[[nodiscard]] HeadState read_plain_head(std::string_view request, PlainHead& head);

}  // namespace pointsman
