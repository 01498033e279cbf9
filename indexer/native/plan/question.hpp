// SPDX-License-Identifier: Apache-2.0
// Prices a Question of router/plan/candidate.py without index and board: decisions of a log, and whatever builds its
// questions in Python.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <unordered_map>
#include <vector>

#include "py_plans.hpp"

namespace pointsman::py {

// Cost models of Python (router/costs/model.py) as those of the core, kept as long as Python keeps the object.
class ModelCache {
 public:
  // Valid until bound() is called.
  const plan::CostModel& get(nb::handle model);
  // Forgets all when there are many.
  void bound();

 private:
  static constexpr std::size_t kMost = 8192;
  struct Entry {
    nb::object model;  // so that its address is not given to another one
    plan::CostModel costs;
  };
  std::unordered_map<PyObject*, std::unique_ptr<Entry>> entries_;
  Field profile_{"profile"};
  std::array<Field, 12> constants_{Field("prefill_start_s"), Field("prefill_s_per_token"),
                                   Field("prefill_s_per_token_squared"), Field("kv_bytes_per_token"), Field("admit_s"),
                                   Field("step_tokens"), Field("decode_start_s"), Field("decode_s_per_request"),
                                   Field("ram_start_s"), Field("ram_bytes_per_s"), Field("storage_start_s"),
                                   Field("storage_bytes_per_s")};
};

class QuestionPlanner {
 public:
  QuestionPlanner(const plan::Settings& settings, const PlanTypes& types) : settings_(settings), types_(types) {}
  QuestionPlanner(const QuestionPlanner&) = delete;

  // The plans of the `keep` best candidates, best first; equals in the order of chance that `seed` gives. `costs` is
  // asked for a model per candidate and for a link per candidate and tried source.
  nb::object plan(nb::handle question, nb::handle costs, std::uint64_t seed, std::size_t keep);
  // All that the only candidate could do, in the order of router/plan/planner.py.
  nb::list options(nb::handle question, nb::handle costs);

 private:
  struct Fields {
    Field prompt_tokens{"prompt_tokens"}, candidates{"candidates"}, sources{"sources"},
        output_tokens{"output_tokens"}, slo_tpot_s{"slo_tpot_s"}, pressure{"pressure"};
    Field worker{"worker"}, dp_rank{"dp_rank"}, block_size{"block_size_tokens"}, chunk_blocks{"chunk_blocks"},
        residence{"residence"}, queue_s{"queue_s"}, decodes{"decodes"}, can_pull{"can_pull"}, pulls{"pulls"},
        sessions{"sessions"}, trust{"trust"}, fingerprint{"fingerprint"}, p2p{"p2p"}, extension{"extension"},
        fresh_tokens{"fresh_tokens"}, resident_tokens{"resident_tokens"}, kv_capacity_tokens{"kv_capacity_tokens"};
    Field model_for{"model_for"}, link{"link"};
  };
  struct AskedCandidate {
    nb::object object;
    nb::object name;
    plan::Candidate values;
    std::size_t first_residence;
  };
  struct AskedSource {
    nb::object object;
    nb::object name;
    plan::Source values;
    std::size_t ram_start, ram_end;
  };
  struct Scored {
    double score_s;
    std::uint64_t chance;
    std::size_t index;
  };

  void prepare(nb::handle question, nb::handle costs);
  void read(nb::handle question);
  void read_candidate(nb::object object);
  void read_source(nb::object object);
  void resolve(nb::handle costs);
  void choose_sources();
  void price(nb::handle costs, std::uint64_t seed, std::vector<plan::Action>* all);
  [[nodiscard]] nb::object make(const AskedCandidate& one, const plan::Action& action) const;
  // Small numbers for names that are equal where it counts.
  std::uint32_t number(std::vector<nb::object>& known, nb::object value) const;

  plan::Settings settings_;
  const PlanTypes& types_;
  Fields fields_;
  ModelCache models_;
  ResidenceReader residences_;

  // Of the question under way.
  std::vector<std::int64_t> tokens_;
  plan::Request request_;
  std::vector<AskedCandidate> candidates_;
  std::vector<AskedSource> sources_;
  std::vector<plan::Source> tried_;
  std::vector<std::uint32_t> tried_order_;
  std::vector<nb::object> workers_;
  std::vector<nb::object> fingerprints_;
  std::vector<plan::Span> spans_;
  std::vector<ResidenceEnds> ends_;
  std::vector<plan::Residence> residence_;
  std::vector<plan::Action> actions_;
  std::vector<Scored> scored_;
  plan::ScoreScratch scratch_;
};

}  // namespace pointsman::py
