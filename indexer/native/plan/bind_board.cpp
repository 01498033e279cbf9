// SPDX-License-Identifier: Apache-2.0
// The Python face of the load board; names of workers are the caller's matter (router/plan/native_board.py).
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/string_view.h>
#include <nanobind/stl/vector.h>

#include <system_error>

#include "bind.hpp"
#include "board.hpp"

namespace pointsman {

namespace nb = nanobind;
using namespace nb::literals;

namespace {

PulledFrom pulled_from(const std::vector<std::uint32_t>& workers) {
  if (workers.size() > kMostSources) throw nb::value_error("a request pulls from 3 workers at most");
  PulledFrom sources;
  for (const std::uint32_t worker : workers) sources.workers[sources.count++] = worker;
  return sources;
}

void open_board(LoadBoard* self, const std::string& path) {
  try {
    new (self) LoadBoard(path);
  } catch (const std::system_error& error) {
    const nb::object arguments = nb::make_tuple(error.code().value(), error.what());
    PyErr_SetObject(PyExc_OSError, arguments.ptr());
    nb::raise_python_error();
  }
}

}  // namespace

void bind_board(nb::module_& m) {
  using Reading = LoadBoard::Reading;
  nb::class_<LoadBoard>(m, "LoadBoard")
      .def(nb::init<>())
      .def("__init__", &open_board, "path"_a)
      .def("hold_worker", &LoadBoard::hold_worker, "name"_a)
      .def("find_worker", &LoadBoard::find_worker, "name"_a)
      .def("name", &LoadBoard::name, "worker"_a)
      .def("drop_worker", &LoadBoard::drop_worker, "worker"_a)
      .def("row", &LoadBoard::row, "worker"_a, "rank"_a)
      .def(
          "promise",
          [](LoadBoard& board, std::uint32_t worker, std::uint32_t rank, double prefill_s, double ttft_s, double now_s,
             const std::vector<std::uint32_t>& sources, bool observable, std::int64_t prompt_tokens,
             std::int64_t missing_tokens) {
            return board.promise({worker, rank, prefill_s, ttft_s, pulled_from(sources), observable, prompt_tokens,
                                  missing_tokens},
                                 now_s);
          },
          "worker"_a, "rank"_a, "prefill_s"_a, "ttft_s"_a, "now_s"_a, "sources"_a, "observable"_a, "prompt_tokens"_a,
          "missing_tokens"_a)
      .def("first_token", &LoadBoard::first_token, "ticket"_a, "now_s"_a)
      .def("release", &LoadBoard::release, "ticket"_a, "now_s"_a)
      .def("sampled", &LoadBoard::sampled, "worker"_a, "running"_a, "waiting"_a, "now_s"_a)
      .def("forget", &LoadBoard::forget, "worker"_a)
      .def("sessions", &LoadBoard::sessions, "destination"_a)
      .def("reap", &LoadBoard::reap, "now_s"_a)
      .def("leave", &LoadBoard::leave, "now_s"_a)
      .def_prop_ro("overflows", &LoadBoard::overflows)
      .def_prop_ro("repairs", &LoadBoard::repairs)
      .def("consistent", &LoadBoard::consistent)
      .def("hang", &LoadBoard::hang)
      .def("queue_s", [](const LoadBoard& b, std::uint32_t row, double now_s) { return Reading(b).queue_s(row, now_s); },
           "row"_a, "now_s"_a)
      .def("decodes", [](const LoadBoard& b, std::uint32_t row, double now_s) { return Reading(b).decodes(row, now_s); },
           "row"_a, "now_s"_a)
      .def("prefilled_s", [](const LoadBoard& b, std::uint32_t row) { return Reading(b).prefilled_s(row); }, "row"_a)
      .def("prefill_tokens", [](const LoadBoard& b, std::uint32_t row) { return Reading(b).prefill_tokens(row); },
           "row"_a)
      .def("active_tokens", [](const LoadBoard& b, std::uint32_t row) { return Reading(b).active_tokens(row); },
           "row"_a)
      .def("pulls", [](const LoadBoard& b, std::uint32_t worker) { return Reading(b).pulls(worker); }, "worker"_a)
      .def("in_flight", [](const LoadBoard& b, std::uint32_t worker) { return Reading(b).in_flight(worker); },
           "worker"_a);
}

}  // namespace pointsman
