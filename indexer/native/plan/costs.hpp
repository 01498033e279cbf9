// SPDX-License-Identifier: Apache-2.0
// Seconds of each path. The formulas of router/costs/model.py in the same order of operations, so that results are
// equal to the last bit; its docstrings say what they mean and where they come from.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <span>

namespace pointsman::plan {

// Constants of pulls from one worker by another (Link).
struct Link {
  double connect_s = 0;
  double lookup_s = 0;
  double bytes_per_s = 1;
  double share_exponent = 1;

  [[nodiscard]] double start_s(bool connected) const { return (connected ? 0.0 : connect_s) + lookup_s; }

  [[nodiscard]] double share_bytes_per_s(double other_pulls) const {
    if (other_pulls == 0) return bytes_per_s;
    if (share_exponent == 1) return bytes_per_s / (1 + other_pulls);  // what pow gives, sooner
    return bytes_per_s / std::pow((1 + other_pulls), share_exponent);
  }
};

// No pull is faster than this.
struct LeastPull {
  double start_s = 0;
  double bytes_per_s = 0;
  bool known = true;

  void include(const Link& link) {
    known = known && link.connect_s >= 0 && link.lookup_s >= 0 && link.bytes_per_s > 0 && link.share_exponent >= 0;
    start_s = bytes_per_s == 0 ? link.lookup_s : std::min(start_s, link.lookup_s);
    bytes_per_s = std::max(bytes_per_s, link.bytes_per_s);
  }
};

// What one of several sources contributes to a plan (SourceShare).
struct SourceShare {
  std::int64_t tokens = 0;
  double start_s = 0;
  double bytes_per_s = 1;
};

// Constants of one worker (CostProfile); the names are those of the profile.
struct Constants {
  double prefill_start_s = 0;
  double prefill_s_per_token = 0;
  double prefill_s_per_token_squared = 0;
  double kv_bytes_per_token = 0;
  double admit_s = 0;
  double step_tokens = 1;
  double decode_start_s = 0;
  double decode_s_per_request = 0;
  double ram_start_s = 0;
  double ram_bytes_per_s = 1;
  double storage_start_s = 0;
  double storage_bytes_per_s = 1;
};

class CostModel {
 public:
  CostModel() = default;
  explicit CostModel(const Constants& constants)
      : c_(constants), step_s_(prefill_s(0, constants.step_tokens, 0)), plain_(are_plain(constants)) {}

  // Whether all constants are as they should be, so that more is never cheaper.
  [[nodiscard]] bool plain() const { return plain_; }

  [[nodiscard]] double prefill_s(double cached_tokens, double missing_tokens, std::int64_t decodes) const {
    const double steps = std::max(missing_tokens / c_.step_tokens, 1.0);
    return c_.prefill_start_s + c_.prefill_s_per_token * missing_tokens +
           c_.prefill_s_per_token_squared * missing_tokens * (cached_tokens + missing_tokens / 2) +
           steps * static_cast<double>(decodes) * c_.decode_s_per_request;
  }

  // At most `prefill_s` of the rest of a prompt; concave in `missing_tokens`.
  [[nodiscard]] double least_prefill_s(double prompt_tokens, double missing_tokens, std::int64_t decodes) const {
    const double steps = prompt_tokens <= c_.step_tokens ? 1.0 : missing_tokens / c_.step_tokens;
    return c_.prefill_start_s + c_.prefill_s_per_token * missing_tokens +
           c_.prefill_s_per_token_squared * missing_tokens * (prompt_tokens - missing_tokens / 2) +
           steps * static_cast<double>(decodes) * c_.decode_s_per_request;
  }

  [[nodiscard]] double admit_s(double queue_s) const { return c_.admit_s + std::max(queue_s - step_s_, 0.0); }

  [[nodiscard]] double decode_step_s(std::int64_t decodes) const {
    return c_.decode_start_s + c_.decode_s_per_request * static_cast<double>(std::max<std::int64_t>(decodes - 1, 0));
  }

  [[nodiscard]] double bytes(std::int64_t tokens) const {
    return static_cast<double>(tokens) * c_.kv_bytes_per_token;
  }
  [[nodiscard]] double promote_bytes_s(double bytes) const { return bytes / c_.ram_bytes_per_s; }

  [[nodiscard]] double decode_s_per_request() const { return c_.decode_s_per_request; }

  [[nodiscard]] double promotion_s(std::int64_t tokens) const {
    if (tokens <= 0) return 0.0;
    return c_.ram_start_s + static_cast<double>(tokens) * c_.kv_bytes_per_token / c_.ram_bytes_per_s;
  }

  // To promote `tokens` again that gave way to as many others in HBM.
  [[nodiscard]] double displaced_s(std::int64_t tokens) const {
    return static_cast<double>(tokens) * c_.kv_bytes_per_token / c_.ram_bytes_per_s;
  }

  // `share_bytes_per_s`: of the link, with the other pulls on it.
  [[nodiscard]] double peer_s(std::int64_t tokens, const Link& link, double share_bytes_per_s, bool connected) const {
    if (tokens <= 0) return 0.0;
    return pull_s(tokens, link, share_bytes_per_s, connected) + promotion_s(tokens);
  }

  [[nodiscard]] double pull_s(std::int64_t tokens, const Link& link, double share_bytes_per_s, bool connected) const {
    return link.start_s(connected) + wire_s(tokens, share_bytes_per_s);
  }

  // From several sources at once.
  [[nodiscard]] double pulls_s(std::span<const SourceShare> shares, double capacity_bytes_per_s) const {
    std::int64_t tokens = 0;
    double start_s = shares[0].start_s;
    double slowest_s = wire_s(shares[0].tokens, shares[0].bytes_per_s);
    for (const SourceShare& one : shares) {
      tokens += one.tokens;
      start_s = std::max(start_s, one.start_s);
      slowest_s = std::max(slowest_s, wire_s(one.tokens, one.bytes_per_s));
    }
    return start_s + std::max(slowest_s, wire_s(tokens, capacity_bytes_per_s)) + promotion_s(tokens);
  }

  // Until one of them is done, where `tokens` come from all.
  [[nodiscard]] double share_s(const SourceShare& share, std::int64_t tokens, double capacity_bytes_per_s) const {
    return share.start_s + std::max(wire_s(share.tokens, share.bytes_per_s), wire_s(tokens, capacity_bytes_per_s));
  }

  [[nodiscard]] double storage_s(std::int64_t tokens) const {
    if (tokens <= 0) return 0.0;
    const double read_s =
        c_.storage_start_s + static_cast<double>(tokens) * c_.kv_bytes_per_token / c_.storage_bytes_per_s;
    return read_s + promotion_s(tokens);
  }

  [[nodiscard]] double wire_s(std::int64_t tokens, double bytes_per_s) const {
    return static_cast<double>(tokens) * c_.kv_bytes_per_token / bytes_per_s;
  }

 private:
  static bool are_plain(const Constants& c) {
    const auto positive = [](double value) { return value > 0 && std::isfinite(value); };
    const auto not_negative = [](double value) { return value >= 0 && std::isfinite(value); };
    return not_negative(c.prefill_start_s) && not_negative(c.prefill_s_per_token) &&
           not_negative(c.prefill_s_per_token_squared) && not_negative(c.kv_bytes_per_token) &&
           not_negative(c.admit_s) && positive(c.step_tokens) && not_negative(c.decode_start_s) &&
           not_negative(c.decode_s_per_request) && not_negative(c.ram_start_s) && positive(c.ram_bytes_per_s) &&
           not_negative(c.storage_start_s) && positive(c.storage_bytes_per_s);
  }

  Constants c_;
  double step_s_ = 0;  // of a whole step of prefill
  bool plain_ = false;
};

}  // namespace pointsman::plan
