// SPDX-License-Identifier: Apache-2.0
#include "py_plans.hpp"

#include <algorithm>

namespace pointsman::py {
namespace {

nb::object text(const char* value) { return nb::steal(PyUnicode_InternFromString(value)); }

nb::object make_spans(plan::Spans spans) {
  nb::object made = nb::steal(PyTuple_New(static_cast<Py_ssize_t>(spans.size())));
  for (std::size_t i = 0; i < spans.size(); ++i) {
    nb::object pair = nb::steal(PyTuple_New(2));
    PyTuple_SET_ITEM(pair.ptr(), 0, number(spans[i].start).release().ptr());
    PyTuple_SET_ITEM(pair.ptr(), 1, number(spans[i].end).release().ptr());
    PyTuple_SET_ITEM(made.ptr(), static_cast<Py_ssize_t>(i), pair.release().ptr());
  }
  return made;
}

nb::object make_terms(const PlanTypes& types, const plan::Terms& terms) {
  return types.terms.make({number(terms.queue_s), number(terms.admit_s), number(terms.ram_s), number(terms.peer_s),
                           number(terms.storage_s), number(terms.prefill_s), number(terms.decode_s),
                           number(terms.displaced_s)});
}

nb::object path_blocks(const PlanTypes& types, const plan::Loads& loads, std::int64_t blocks) {
  nb::object paths = nb::steal(PyDict_New());
  const auto count = [&](const nb::object& name, std::int64_t value) {
    if (value != 0 && PyDict_SetItem(paths.ptr(), name.ptr(), number(value).ptr()) != 0) nb::raise_python_error();
  };
  count(types.hbm, loads.hbm);
  count(types.ram, loads.below[plan::kRam]);
  count(types.peer, loads.below[plan::kPeer]);
  count(types.storage, loads.below[plan::kStorage]);
  count(types.recompute, blocks - loads.total());
  return paths;
}

void read_spans(nb::handle sequence, std::vector<plan::Span>& spans) {
  for_each(sequence, [&](nb::handle pair) {
    std::int64_t edges[2] = {};
    std::size_t count = 0;
    for_each(pair, [&](nb::handle edge) {
      if (count == 2) throw nb::value_error("a span has a start and an end");
      edges[count++] = to_integer(edge);
    });
    if (count != 2) throw nb::value_error("a span has a start and an end");
    spans.push_back({edges[0], edges[1]});
  });
}

}  // namespace

PlanTypes::PlanTypes(nb::handle module)
    : plan(module.attr("Plan"), {"worker", "dp_rank", "block_size_tokens", "prompt_blocks", "path_blocks",
                                 "cached_tokens", "terms", "score_s", "source", "max_load_tokens", "use_storage",
                                 "circumstances", "pulls", "extension"}),
      source(module.attr("Source"),
             {"worker", "dp_rank", "host", "port", "residence", "pulls", "trust", "fingerprint", "p2p", "extension",
              "extension_address"}),
      residence(module.attr("Residence"), {"hbm", "ram", "storage"}),
      candidate(module.attr("Candidate"),
                {"worker", "dp_rank", "block_size_tokens", "chunk_blocks", "residence", "queue_s", "decodes",
                 "in_flight", "can_pull", "pulls", "sessions", "prefill_tokens", "active_tokens", "trust",
                 "fingerprint", "extension", "fresh_tokens", "resident_tokens", "kv_capacity_tokens",
                 "speculative_tokens"}),
      terms(module.attr("Terms"),
            {"queue_s", "admit_s", "ram_s", "peer_s", "storage_s", "prefill_s", "decode_s", "displaced_s"}),
      circumstances(module.attr("Circumstances"), {"decodes", "other_pulls", "connected"}),
      pull(module.attr("Pull"), {"source", "start_block", "end_block", "blocks", "seconds", "other_pulls", "connected"}),
      hbm(text("hbm")), ram(text("ram")), peer(text("peer")), storage(text("storage")), recompute(text("recompute")) {}

nb::object make_plan(const PlanTypes& types, const plan::Candidate& candidate, const plan::Action& action,
                     PlanFacts facts) {
  const std::int64_t size = candidate.block_size;
  return types.plan.make({
      std::move(facts.worker),
      number(facts.dp_rank),
      number(size),
      number(facts.prompt_blocks),
      path_blocks(types, action.loads, facts.prompt_blocks),
      number(action.loads.total() * size),
      make_terms(types, action.terms),
      number(action.score_s),
      std::move(facts.source),
      action.cap_blocks == plan::kWhole ? nb::none() : number(action.cap_blocks * size),
      boolean(action.use_storage),
      types.circumstances.make({number(facts.decodes), number(facts.other_pulls), boolean(facts.connected)}),
      std::move(facts.pulls),
      boolean(candidate.extension),
  });
}

nb::object make_residence(const PlanTypes& types, const plan::Residence& residence) {
  return types.residence.make({make_spans(residence.hbm), make_spans(residence.ram), make_spans(residence.storage)});
}

std::int64_t count_blocks(std::span<const std::int64_t> prompt_tokens, std::int64_t block_size) {
  std::int64_t blocks = 0;
  for (const std::int64_t tokens : prompt_tokens) blocks += (tokens + block_size - 1) / block_size;
  return blocks;
}

plan::Residence ResidenceEnds::over(std::span<const plan::Span> spans) const {
  return {spans.subspan(start, hbm - start), spans.subspan(hbm, ram - hbm), spans.subspan(ram, storage - ram)};
}

ResidenceReader::ResidenceReader() : hbm_("hbm"), ram_("ram"), storage_("storage") {}

ResidenceEnds ResidenceReader::read(nb::handle residence, std::vector<plan::Span>& spans) const {
  ResidenceEnds ends{spans.size(), 0, 0, 0};
  read_spans(hbm_.of(residence), spans);
  ends.hbm = spans.size();
  read_spans(ram_.of(residence), spans);
  ends.ram = spans.size();
  read_spans(storage_.of(residence), spans);
  ends.storage = spans.size();
  return ends;
}

}  // namespace pointsman::py
