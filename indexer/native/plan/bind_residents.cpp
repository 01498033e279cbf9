// SPDX-License-Identifier: Apache-2.0
// The Python face of Residents (router/plan/residents.py).
#include <nanobind/nanobind.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <cstring>

#include "bind.hpp"
#include "residents.hpp"

namespace pointsman {

namespace nb = nanobind;
using namespace nb::literals;

namespace {

std::vector<std::uint64_t> hashes_of(const nb::bytes& packed) {
  if (packed.size() % sizeof(std::uint64_t) != 0) throw nb::value_error("hashes have 8 bytes each");
  std::vector<std::uint64_t> hashes(packed.size() / sizeof(std::uint64_t));
  if (!hashes.empty()) std::memcpy(hashes.data(), packed.c_str(), packed.size());
  return hashes;
}

// (row, shared, ready_s)
std::vector<std::tuple<std::uint32_t, std::uint32_t, double>> leading(const Residents& self, std::int64_t block_size,
                                                                      const nb::bytes& hashes) {
  std::vector<Residents::Leading> by_row;
  Residents::Reading(self).leading(block_size, hashes_of(hashes), by_row);
  std::vector<std::tuple<std::uint32_t, std::uint32_t, double>> found;
  for (std::uint32_t row = 0; row < by_row.size(); ++row) {
    if (by_row[row].shared != 0) found.emplace_back(row, by_row[row].shared, by_row[row].ready_s);
  }
  return found;
}

}  // namespace

void bind_residents(nb::module_& m) {
  nb::class_<Residents>(m, "Residents")
      .def(nb::init<>())
      .def(
          "begin",
          [](Residents& self, std::uint32_t row, std::int64_t block_size, const nb::bytes& hashes, double ready_s) {
            return self.begin(row, block_size, hashes_of(hashes), ready_s);
          },
          "row"_a, "block_size"_a, "hashes"_a, "ready_s"_a)
      .def(
          "end",
          [](Residents& self, std::uint64_t id) {
            if (!self.end(id)) throw nb::key_error("no such prompt is in flight");
          },
          "number"_a)
      .def("leading", &leading, "block_size"_a, "hashes"_a)
      .def("tokens", [](const Residents& self, std::uint32_t row) { return Residents::Reading(self).tokens(row); },
           "row"_a)
      .def_prop_ro("prompts", &Residents::prompts)
      .def_prop_ro("nodes", &Residents::nodes);
}

}  // namespace pointsman
