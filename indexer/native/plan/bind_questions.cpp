// SPDX-License-Identifier: Apache-2.0
// The Python face of QuestionPlanner (router/plan/native.py).
#include <nanobind/nanobind.h>
#include <nanobind/stl/vector.h>

#include "bind.hpp"
#include "py_costs.hpp"
#include "question.hpp"

namespace pointsman {

namespace nb = nanobind;
using namespace nb::literals;
using py::QuestionPlanner;

namespace {

// The best plan of each question with its own costs.
nb::list best(QuestionPlanner& self, const nb::iterable& questions, std::uint64_t seed) {
  nb::list plans;
  for (const nb::handle pair : questions) {
    plans.append(nb::object(self.plan(nb::object(pair[0]), nb::object(pair[1]), seed++, 1)[0]));
  }
  return plans;
}

}  // namespace

void bind_questions(nb::module_& m) {
  nb::class_<QuestionPlanner>(m, "QuestionPlanner")
      .def(
          "__init__",
          [](QuestionPlanner* self, double gpu_seconds_weight, double pull_deadline_s, std::int64_t min_pull_tokens,
             const py::PlanTypes& types) {
            new (self) QuestionPlanner({gpu_seconds_weight, pull_deadline_s, min_pull_tokens}, types);
          },
          "gpu_seconds_weight"_a, "pull_deadline_s"_a, "min_pull_tokens"_a, "types"_a, nb::keep_alive<1, 5>())
      .def("plan", &QuestionPlanner::plan, "question"_a, "costs"_a, "seed"_a, "keep"_a)
      .def("options", &QuestionPlanner::options, "question"_a, "costs"_a)
      .def("best", &best, "questions"_a, "seed"_a);
}

}  // namespace pointsman
