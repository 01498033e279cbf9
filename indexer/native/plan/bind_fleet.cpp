// SPDX-License-Identifier: Apache-2.0
// The Python face of the fleet's planner (router/plan/native_fleet.py). The GIL is released while it decides.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/string_view.h>
#include <nanobind/stl/vector.h>

#include <string>

#include "bind.hpp"
#include "fleet.hpp"
#include "py_costs.hpp"
#include "py_plans.hpp"

namespace pointsman {

namespace nb = nanobind;
using namespace nb::literals;
using namespace plan;

namespace {

// A list of 32-bit buffers, held while the core reads them.
class TokenBuffers {
 public:
  explicit TokenBuffers(const nb::sequence& prompts) {
    views_.reserve(nb::len(prompts));
    for (const nb::handle prompt : prompts) {
      Py_buffer& view = views_.emplace_back();
      if (PyObject_GetBuffer(prompt.ptr(), &view, PyBUF_CONTIG_RO) != 0) {
        views_.pop_back();
        release();
        nb::raise_python_error();
      }
      if (view.itemsize != 4) {
        release();
        throw nb::value_error("token ids are unsigned 32-bit integers");
      }
    }
  }
  TokenBuffers(const TokenBuffers&) = delete;
  ~TokenBuffers() { release(); }

  [[nodiscard]] std::vector<std::span<const std::uint32_t>> tokens() const {
    std::vector<std::span<const std::uint32_t>> result;
    for (const Py_buffer& view : views_) {
      result.emplace_back(static_cast<const std::uint32_t*>(view.buf), static_cast<std::size_t>(view.len) / 4);
    }
    return result;
  }

 private:
  void release() {
    for (Py_buffer& view : views_) PyBuffer_Release(&view);
    views_.clear();
  }
  std::vector<Py_buffer> views_;
};

std::vector<Member> members(const std::vector<std::pair<std::uint32_t, std::uint32_t>>& pairs) {
  std::vector<Member> result;
  for (const auto& [row, fingerprint] : pairs) result.push_back({row, fingerprint});
  return result;
}

std::uint32_t add_rows(FleetPlanner& planner, std::uint32_t worker, const std::vector<std::uint32_t>& board_rows,
                       std::int64_t block_size, std::int64_t chunk_blocks, bool can_pull, bool extension, bool p2p,
                       std::int64_t kv_capacity_tokens) {
  if (board_rows.empty()) throw nb::value_error("a worker has at least one rank");
  std::vector<FleetPlanner::Row> rows;
  const auto ranks = static_cast<std::uint32_t>(board_rows.size());
  for (std::uint32_t rank = 0; rank < ranks; ++rank) {
    rows.push_back({worker, rank, ranks, board_rows[rank], block_size, chunk_blocks, can_pull, extension, p2p,
                    kv_capacity_tokens});
  }
  return planner.add_rows(rows);
}

template <typename Index>
Outcome decide(FleetPlanner& planner, const Index& index, const Selection& selection, std::int64_t rank,
               std::vector<std::uint32_t> without, const nb::sequence& prompts, std::int64_t estimated_tokens,
               std::string_view model, std::string_view lora, const std::vector<std::string>& first_block_keys,
               bool may_pull, std::int64_t output_tokens, std::optional<double> slo_tpot_s, double pressure,
               double now_s, std::uint64_t seed, std::size_t keep) {
  const TokenBuffers buffers(prompts);
  Asked asked{.prompts = buffers.tokens(),
              .estimated_tokens = estimated_tokens,
              .root = 0,
              .first_block_keys = {},
              .may_pull = may_pull,
              .output_tokens = output_tokens,
              .slo_tpot_s = slo_tpot_s,
              .pressure = pressure,
              .now_s = now_s,
              .seed = seed,
              .keep = keep};
  const nb::gil_scoped_release release;
  for (const std::string& key : first_block_keys) append_extra_text(asked.first_block_keys, key);
  asked.root = index.chain().root(model, lora);
  return planner.decide(selection, {rank, std::move(without)}, asked);
}

// Names by row, addresses by row, fingerprints by number: what the core does not know.
struct Names {
  nb::list workers;
  nb::list addresses;  // (host, port) of the P2P tier, and that of our extension as one text
  nb::list fingerprints;

  [[nodiscard]] nb::object worker(std::uint32_t row) const { return workers[row]; }
  [[nodiscard]] nb::object fingerprint(std::uint32_t number) const { return fingerprints[number]; }
};

nb::object make_source(const py::PlanTypes& types, const TriedSource& tried, const Names& names) {
  const nb::object address = names.addresses[tried.row];
  return types.source.make({names.worker(tried.row), py::number(std::int64_t{tried.rank}), nb::object(address[0]),
                            nb::object(address[1]), py::make_residence(types, tried.residence),
                            py::number(tried.source.pulls), py::number(tried.source.trust),
                            names.fingerprint(tried.source.fingerprint), py::boolean(tried.source.p2p),
                            py::boolean(tried.source.extension), nb::object(address[2])});
}

// The kept plans, best first; plans from one source share its object.
nb::object plans(const Outcome& outcome, const py::PlanTypes& types, const Names& names) {
  std::vector<nb::object> made_sources(outcome.sources.size());
  nb::object made = nb::steal(PyTuple_New(static_cast<Py_ssize_t>(outcome.kept)));
  for (std::size_t i = 0; i < outcome.kept; ++i) {
    const Ranked& one = outcome.ranking[i];
    py::PlanFacts facts{.worker = names.worker(one.row),
                        .dp_rank = one.rank,
                        .prompt_blocks = py::count_blocks(outcome.prompt_tokens, one.candidate.block_size),
                        .decodes = one.candidate.decodes,
                        .other_pulls = 0,
                        .connected = true,
                        .source = nb::none(),
                        .pulls = nb::none()};
    const auto of_source = [&](std::size_t index) -> py::SourceFacts {
      nb::object& source = made_sources[index];
      if (!source.is_valid()) source = make_source(types, outcome.sources[index], names);
      return {source, std::max(one.candidate.pulls, outcome.sources[index].source.pulls),
              (one.connected >> index & 1) != 0};
    };
    facts.tell_of(types, one.action, of_source);
    PyTuple_SET_ITEM(made.ptr(), static_cast<Py_ssize_t>(i),
                     py::make_plan(types, one.candidate, one.action, std::move(facts)).release().ptr());
  }
  return made;
}

nb::object make_candidate(const Outcome& outcome, const Ranked& one, const py::PlanTypes& types, const Names& names) {
  nb::list residence;
  for (const Residence& each : one.residence) residence.append(py::make_residence(types, each));
  nb::object sessions = nb::steal(PyFrozenSet_New(nullptr));
  for (std::size_t i = 0; i < outcome.sources.size(); ++i) {
    if ((one.connected >> i & 1) != 0) PySet_Add(sessions.ptr(), names.worker(outcome.sources[i].row).ptr());
  }
  const Candidate& c = one.candidate;
  return types.candidate.make({names.worker(one.row), py::number(std::int64_t{one.rank}), py::number(c.block_size),
                               py::number(c.chunk_blocks), residence, py::number(c.queue_s), py::number(c.decodes),
                               py::number(one.in_flight), nb::cast(c.can_pull), py::number(c.pulls), sessions,
                               py::number(one.prefill_tokens), py::number(one.active_tokens), py::number(c.trust),
                               names.fingerprint(c.fingerprint), py::boolean(c.extension), py::number(c.fresh_tokens),
                               py::number(c.resident_tokens), py::number(c.kv_capacity_tokens),
                               py::number(c.speculative_tokens)});
}

// The candidates of the ranking in its order, and the one that could have most of the prompt cached.
nb::list candidates(const Outcome& outcome, const py::PlanTypes& types, const Names& names) {
  nb::list made;
  for (const Ranked& one : outcome.ranking) made.append(make_candidate(outcome, one, types, names));
  return made;
}

nb::list sources(const Outcome& outcome, const py::PlanTypes& types, const Names& names) {
  nb::list made;
  for (const TriedSource& tried : outcome.sources) made.append(make_source(types, tried, names));
  return made;
}

template <typename Source, typename Index>
void make_planner(FleetPlanner* self, Index& index, const LoadBoard& board, const Residents& residents,
                  const SlotStamps& stamps,
                  double gpu_seconds_weight, double pull_deadline_s, std::int64_t min_pull_tokens, double speculative_s,
                  double good_faith_tokens, double memory_s, double least) {
  new (self) FleetPlanner(std::make_unique<Source>(index), board, residents, stamps,
                          {gpu_seconds_weight, pull_deadline_s, min_pull_tokens}, speculative_s,
                          {good_faith_tokens, memory_s, least});
}

// The block hashes of each prompt in blocks of that size, as it was asked about; none where it was not.
nb::list hashes(const Outcome& outcome, std::int64_t block_size) {
  nb::list made;
  for (const HashedPrompt& prompt : outcome.hashed) {
    if (prompt.block_size != block_size) continue;
    made.append(nb::bytes(reinterpret_cast<const char*>(prompt.hashes.data()), prompt.hashes.size() * 8));
  }
  return made;
}

void bind_planner(nb::module_& m) {
  nb::class_<FleetPlanner>(m, "FleetPlanner")
      .def("__init__", &make_planner<OwnIndex, const PrefixIndex>, "index"_a, "board"_a, "residents"_a, "stamps"_a,
           "gpu_seconds_weight"_a, "pull_deadline_s"_a, "min_pull_tokens"_a, "speculative_s"_a, "good_faith_tokens"_a,
           "trust_memory_s"_a, "least_trust"_a, nb::keep_alive<1, 2>(), nb::keep_alive<1, 3>(), nb::keep_alive<1, 4>(),
           nb::keep_alive<1, 5>())
      .def("__init__", &make_planner<ReadIndex, IndexReader>, "index"_a, "board"_a, "residents"_a, "stamps"_a,
           "gpu_seconds_weight"_a, "pull_deadline_s"_a, "min_pull_tokens"_a, "speculative_s"_a, "good_faith_tokens"_a,
           "trust_memory_s"_a, "least_trust"_a, nb::keep_alive<1, 2>(), nb::keep_alive<1, 3>(), nb::keep_alive<1, 4>(),
           nb::keep_alive<1, 5>())
      .def("add_rows", &add_rows, "worker"_a, "board_rows"_a, "block_size"_a, "chunk_blocks"_a, "can_pull"_a,
           "extension"_a, "p2p"_a, "kv_capacity_tokens"_a)
      .def("remove_rows", &FleetPlanner::remove_rows, "first"_a)
      .def("forget", &FleetPlanner::forget, "worker"_a)
      .def("set_costs", [](FleetPlanner& self, std::uint32_t worker,
                           const std::vector<double>& constants) { self.set_costs(worker, py::to_costs(constants)); },
           "worker"_a, "constants"_a)
      .def("set_trust", [](FleetPlanner& self, std::uint32_t worker, double promised, double kept, double at_s) {
             self.set_trust(worker, {promised, kept, at_s});
           }, "worker"_a, "promised"_a, "kept"_a, "at_s"_a)
      .def("set_usual_link", [](FleetPlanner& self, const std::vector<double>& link) {
             self.set_usual_link(py::to_link(link));
           }, "link"_a)
      .def("set_link", [](FleetPlanner& self, std::uint32_t source, std::uint32_t destination,
                          const std::vector<double>& link) { self.set_link(source, destination, py::to_link(link)); },
           "source"_a, "destination"_a, "link"_a)
      .def("unset_link", &FleetPlanner::unset_link, "source"_a, "destination"_a)
      .def("bind_slots", [](FleetPlanner& self, std::uint32_t first_row, const std::vector<SlotId>& slots,
                            const std::vector<bool>& suspect, SlotId store) {
             if (slots.size() != suspect.size()) throw nb::value_error("one suspicion per slot");
             self.bind_slots(first_row, slots, suspect, store);
           }, "first_row"_a, "slots"_a, "suspect"_a, "store"_a)
      .def("unbind_slots", &FleetPlanner::unbind_slots, "worker"_a)
      .def("survey", [](const FleetPlanner& self, const Selection& selection, std::int64_t rank,
                        std::vector<std::uint32_t> without, double now_s) {
             const Survey found = self.survey(selection, {rank, std::move(without)}, now_s);
             return std::pair(found.busy, found.ranks);
           }, "selection"_a, "rank"_a, "without"_a, "now_s"_a)
      .def("decide", &decide<PrefixIndex>, "index"_a, "selection"_a, "rank"_a, "without"_a, "prompts"_a, "estimated_tokens"_a,
           "model"_a, "lora"_a, "first_block_keys"_a, "may_pull"_a, "output_tokens"_a, "slo_tpot_s"_a.none(),
           "pressure"_a, "now_s"_a, "seed"_a, "keep"_a)
      .def("decide", &decide<IndexReader>, "index"_a, "selection"_a, "rank"_a, "without"_a, "prompts"_a, "estimated_tokens"_a,
           "model"_a, "lora"_a, "first_block_keys"_a, "may_pull"_a, "output_tokens"_a, "slo_tpot_s"_a.none(),
           "pressure"_a, "now_s"_a, "seed"_a, "keep"_a);
}

}  // namespace

void bind_fleet(nb::module_& m) {
  nb::class_<SlotStamps>(m, "SlotStamps")
      .def(nb::init<>())
      .def("set", &SlotStamps::set, "slot"_a, "at_s"_a);
  nb::class_<Selection>(m, "Selection")
      .def("__init__", [](Selection* self, const std::vector<std::pair<std::uint32_t, std::uint32_t>>& candidates,
                          const std::vector<std::pair<std::uint32_t, std::uint32_t>>& sources) {
             new (self) Selection{members(candidates), members(sources)};
           }, "candidates"_a, "sources"_a);
  nb::class_<py::PlanTypes>(m, "PlanTypes").def(nb::init<nb::handle>(), "module"_a);
  nb::class_<Names>(m, "Names").def(
      "__init__",
      [](Names* self, nb::list workers, nb::list addresses, nb::list fingerprints) {
        new (self) Names{std::move(workers), std::move(addresses), std::move(fingerprints)};
      },
      "workers"_a, "addresses"_a, "fingerprints"_a);
  nb::class_<Outcome>(m, "Outcome")
      .def_ro("count", &Outcome::candidates)
      .def_ro("index_version", &Outcome::index_version)
      .def_ro("newest_event_s", &Outcome::newest_event_s)
      .def_ro("indexed", &Outcome::indexed)
      .def("hashes", &hashes, "block_size"_a)
      .def("plans", &plans, "types"_a, "names"_a)
      .def("candidates", &candidates, "types"_a, "names"_a)
      .def("sources", &sources, "types"_a, "names"_a);
  bind_planner(m);
}

}  // namespace pointsman
