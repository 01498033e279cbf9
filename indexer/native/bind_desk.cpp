// SPDX-License-Identifier: Apache-2.0
// The Python face of QueryDesk.
#include "bind_desk.hpp"

#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <tuple>

#include "query_desk.hpp"

namespace pointsman {

namespace nb = nanobind;
using namespace nb::literals;

namespace {

// (slot, instance, registration, row, is_store); the numbers are positions within the group.
using PlaceRow = std::tuple<SlotId, std::uint32_t, std::uint32_t, std::uint32_t, bool>;

void put(QueryDesk& desk, const std::string& model, const std::string& tenant, std::uint32_t block_size,
         std::vector<std::string> instances, std::vector<std::uint32_t> row_ranks, std::vector<std::string> adapters,
         const std::vector<PlaceRow>& places) {
  if (block_size == 0) throw nb::value_error("block_size must be at least 1");
  DeskGroup group{block_size, std::move(instances), std::move(row_ranks), std::move(adapters), {}};
  for (const auto& [slot, instance, registration, row, is_store] : places) {
    if (instance >= group.instances.size() || row >= group.row_ranks.size()) {
      throw nb::value_error("a place names an instance or a row that the group does not have");
    }
    group.places.emplace(slot, DeskPlace{slot, instance, registration, row, is_store});
  }
  desk.put(model, tenant, std::move(group));
}

std::string_view view(const nb::bytes& bytes) { return {bytes.c_str(), bytes.size()}; }

nb::object to_bytes(std::string_view bytes) { return nb::bytes(bytes.data(), bytes.size()); }

// The GIL is kept: an answer takes less time than to get the GIL back from a thread that runs Python.
nb::object request(QueryDesk& desk, const nb::bytes& received) {
  const QueryDesk::Answered answered = desk.request(view(received));
  if (const auto* missing = std::get_if<std::size_t>(&answered)) return nb::int_(*missing);
  if (const auto* http = std::get_if<std::string_view>(&answered)) return to_bytes(*http);
  return nb::none();
}

}  // namespace

void bind_desk(nb::module_& m) {
  nb::class_<QueryDesk>(m, "QueryDesk")
      .def(nb::init<const PrefixIndex&>(), "index"_a, nb::keep_alive<1, 2>())
      .def("clear", &QueryDesk::clear)
      .def("put", &put, "model"_a, "tenant"_a, "block_size"_a, "instances"_a, "row_ranks"_a, "adapters"_a, "places"_a)
      .def("request", &request, "received"_a);
}

}  // namespace pointsman
