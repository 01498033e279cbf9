// SPDX-License-Identifier: Apache-2.0
// Fuzz target: bytes of a connection to the HTTP service, as its gate sees them.
//
// What the reader of the plain form takes must be what it says: written again in the shortest form, it is read as the
// same. An answer must come only to a whole request, and no prefix of a request that was answered is answered itself.
#include <cstdio>
#include <cstdlib>
#include <string>
#include <string_view>

#include "plain_query.hpp"
#include "query_desk.hpp"

using namespace pointsman;

namespace {

void require(bool condition, const char* what) {
  if (condition) return;
  std::fprintf(stderr, "broken: %s\n", what);
  std::abort();
}

std::string written(const PlainQuery& query) {
  std::string out = "{\"token_ids\":[";
  for (std::size_t i = 0; i < query.tokens.size(); ++i) out += (i == 0 ? "" : ",") + std::to_string(query.tokens[i]);
  out += "],\"model_name\":\"" + std::string(query.model) + '"';
  const auto optional = [&](const char* name, std::string_view value) {
    if (!value.empty()) out += ",\"" + std::string(name) + "\":\"" + std::string(value) + '"';
  };
  optional("tenant_id", query.tenant);
  optional("lora_name", query.lora);
  optional("cache_salt", query.salt);
  return out + '}';
}

void require_read_as_written(std::string_view body) {
  PlainQuery first, second;
  if (!read_plain_query(body, first)) return;
  const std::string again = written(first);
  require(read_plain_query(again, second), "what was read cannot be written");
  require(first.tokens == second.tokens && first.model == second.model && first.tenant == second.tenant &&
              first.lora == second.lora && first.salt == second.salt,
          "what was written is read as something else");
}

QueryDesk& desk() {
  static PrefixIndex index(HashKey{1, 2}, Limits{});
  static QueryDesk one(index);
  static const bool filled = [] {
    const SlotId slot = index.open("m", false);
    one.put("m", "default", DeskGroup{4, {"1"}, {0}, {"adapter"}, {{slot, DeskPlace{slot, 0, 0, 0, false}}}});
    return true;
  }();
  static_cast<void>(filled);
  return one;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const std::string_view received(reinterpret_cast<const char*>(data), size);
  require_read_as_written(received);
  const QueryDesk::Answered answered = desk().request(received);
  if (const auto* wanted = std::get_if<std::size_t>(&answered)) {
    require(*wanted == 0 || *wanted > size, "more is asked for than is missing");
  }
  if (std::holds_alternative<std::string_view>(answered)) {
    const std::size_t body = received.find("\r\n\r\n") + 4;
    require_read_as_written(received.substr(body));
    for (const std::size_t cut : {std::size_t{1}, body / 2, body, body + (size - body) / 2, size - 1}) {
      if (cut >= size) continue;
      const QueryDesk::Answered part = desk().request(received.substr(0, cut));
      require(std::holds_alternative<std::size_t>(part), "a part of a request is not waited for");
    }
  }
  return 0;
}
