// SPDX-License-Identifier: Apache-2.0
// The values of router/plan/candidate.py, made from and read into those of the core.
#pragma once

#include <cstdint>
#include <vector>

#include "fleet.hpp"
#include "py_structs.hpp"

namespace pointsman::py {

// The classes, in one place: Plan, Terms, Circumstances, Source, Residence, Candidate.
struct PlanTypes {
  explicit PlanTypes(nb::handle module);
  SlottedType plan, source, residence, candidate;
  TupleType terms, circumstances;
  nb::object hbm, ram, peer, storage, recompute;  // names of paths
};

// What a plan is made of besides its action.
struct PlanFacts {
  nb::object worker;
  std::int64_t dp_rank;
  std::int64_t prompt_blocks;
  std::int64_t decodes;
  std::int64_t other_pulls;
  bool connected;
  nb::object source;
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
