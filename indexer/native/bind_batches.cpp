// SPDX-License-Identifier: Apache-2.0
// The Python face of batches.hpp.
#include "bind_batches.hpp"

#include <nanobind/stl/vector.h>

#include "batches.hpp"

namespace pointsman {

namespace nb = nanobind;
using namespace nb::literals;

namespace {

std::vector<std::string_view> views(const std::vector<nb::bytes>& payloads) {
  std::vector<std::string_view> result;
  result.reserve(payloads.size());
  for (const nb::bytes& payload : payloads) result.emplace_back(payload.c_str(), payload.size());
  return result;
}

std::vector<std::uint64_t> digests(const std::vector<nb::bytes>& payloads) {
  std::vector<std::uint64_t> result;
  result.reserve(payloads.size());
  for (const std::string_view payload : views(payloads)) result.push_back(digest(payload));
  return result;
}

}  // namespace

std::pair<ApplyCounts, std::uint64_t> apply_payloads(PrefixIndex& index, const std::vector<SlotId>& ranks,
                                                     std::uint32_t default_rank, SlotId store,
                                                     const std::vector<nb::bytes>& payloads, double now_s) {
  const std::vector<std::string_view> batches = views(payloads);
  const nb::gil_scoped_release release;
  const ManyCounts many = apply_many(index, ranks, default_rank, store, batches, now_s);
  return {many.sum, many.malformed_batches};
}

void bind_batches(nb::module_& m) {
  m.def("digests", &digests, "payloads"_a);
}

}  // namespace pointsman
