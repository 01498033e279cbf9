// SPDX-License-Identifier: Apache-2.0
// Constants as a list of numbers, in the order of PROFILE_FIELDS and Link of router/plan/native_fleet.py.
#pragma once

#include <nanobind/nanobind.h>

#include <vector>

#include "costs.hpp"

namespace pointsman::py {

inline plan::CostModel to_costs(const std::vector<double>& c) {
  if (c.size() != 12) throw nanobind::value_error("a worker has 12 constants");
  return plan::CostModel({.prefill_start_s = c[0],
                          .prefill_s_per_token = c[1],
                          .prefill_s_per_token_squared = c[2],
                          .kv_bytes_per_token = c[3],
                          .admit_s = c[4],
                          .step_tokens = c[5],
                          .decode_start_s = c[6],
                          .decode_s_per_request = c[7],
                          .ram_start_s = c[8],
                          .ram_bytes_per_s = c[9],
                          .storage_start_s = c[10],
                          .storage_bytes_per_s = c[11]});
}

inline plan::Link to_link(const std::vector<double>& c) {
  if (c.size() != 4) throw nanobind::value_error("a link has 4 constants");
  return {c[0], c[1], c[2], c[3]};
}

}  // namespace pointsman::py
