// SPDX-License-Identifier: Apache-2.0
// The values of router/plan/candidate.py, made from and read into those of the core.
#pragma once

#include <cstdint>
#include <vector>

#include "fleet.hpp"
#include "py_structs.hpp"

namespace pointsman::py {

// The classes, in one place: Plan, Pull, Terms, Circumstances, Source, Residence, Candidate.
struct PlanTypes {
  explicit PlanTypes(nb::handle module);
  SlottedType plan, source, residence, candidate;
  TupleType terms, circumstances, pull;
  nb::object hbm, ram, peer, storage, recompute;  // names of paths
};

// A source that was tried, as a plan that pulls from it tells.
struct SourceFacts {
  nb::object object;
  double other_pulls;
  bool connected;
};

// What a plan is made of besides its action.
struct PlanFacts {
  nb::object worker;
  std::int64_t dp_rank;
  std::int64_t prompt_blocks;
  std::int64_t decodes;
  double other_pulls;
  bool connected;
  nb::object source;
  nb::object pulls;

  // Where the action's blocks come from; `of_source(i)` makes the SourceFacts of a source that was tried.
  template <typename OfSource>
  void tell_of(const PlanTypes& types, const plan::Action& action, OfSource&& of_source) {
    if (action.source != plan::kNoSource) {
      SourceFacts first = of_source(static_cast<std::size_t>(action.source));
      source = std::move(first.object);
      other_pulls = first.other_pulls;
      connected = first.connected;
    }
    pulls = nb::steal(PyTuple_New(static_cast<Py_ssize_t>(action.pull_count)));
    for (std::size_t i = 0; i < action.pull_count; ++i) {
      const plan::Pulled& one = action.pulls[i];
      SourceFacts facts = of_source(static_cast<std::size_t>(one.source));
      nb::object pull =
          types.pull.make({std::move(facts.object), number(one.start), number(one.end), number(one.blocks),
                           number(one.seconds), number(facts.other_pulls), boolean(facts.connected)});
      PyTuple_SET_ITEM(pulls.ptr(), static_cast<Py_ssize_t>(i), pull.release().ptr());
    }
  }
};

nb::object make_plan(const PlanTypes& types, const plan::Candidate& candidate, const plan::Action& action,
                     PlanFacts facts);
nb::object make_residence(const PlanTypes& types, const plan::Residence& residence);

// Blocks of all prompts, the last partial ones included.
std::int64_t count_blocks(std::span<const std::int64_t> prompt_tokens, std::int64_t block_size);

// Appends the spans of a Residence to `spans`; pointers are set later, when `spans` no longer grows.
struct ResidenceEnds {
  std::size_t start, hbm, ram, storage;
  [[nodiscard]] plan::Residence over(std::span<const plan::Span> spans) const;
};
class ResidenceReader {
 public:
  ResidenceReader();
  ResidenceEnds read(nb::handle residence, std::vector<plan::Span>& spans) const;

 private:
  Field hbm_, ram_, storage_;
};

}  // namespace pointsman::py
