// SPDX-License-Identifier: Apache-2.0
#include "question.hpp"

#include <algorithm>

#include "py_costs.hpp"

namespace pointsman::py {
namespace {

bool contains(nb::handle set, nb::handle name) {
  const int found = PySequence_Contains(set.ptr(), name.ptr());
  if (found < 0) nb::raise_python_error();
  return found != 0;
}

// A NamedTuple of the four constants.
plan::Link read_link(nb::handle link) {
  if (!PyTuple_Check(link.ptr()) || PyTuple_GET_SIZE(link.ptr()) != 4) throw nb::type_error("a Link is needed");
  const auto constant = [&](Py_ssize_t i) { return to_real(PyTuple_GET_ITEM(link.ptr(), i)); };
  return {constant(0), constant(1), constant(2), constant(3)};
}

}  // namespace

void ModelCache::bound() {
  if (entries_.size() > kMost) entries_.clear();
}

const plan::CostModel& ModelCache::get(nb::handle model) {
  const auto known = entries_.find(model.ptr());
  if (known != entries_.end()) return known->second->costs;
  const nb::object profile = profile_.of(model);
  std::vector<double> constants;
  for (const Field& field : constants_) constants.push_back(field.real(profile));
  auto& entry = entries_[model.ptr()];
  entry = std::make_unique<Entry>(Entry{nb::borrow(model), to_costs(constants)});
  return entry->costs;
}

nb::object QuestionPlanner::plan(nb::handle question, nb::handle costs, std::uint64_t seed, std::size_t keep) {
  prepare(question, costs);
  price(costs, seed, nullptr);
  keep = std::min(keep, scored_.size());
  const auto end = scored_.begin() + static_cast<std::ptrdiff_t>(keep);
  std::partial_sort(scored_.begin(), end, scored_.end(), [](const Scored& a, const Scored& b) {
    return a.score_s != b.score_s ? a.score_s < b.score_s : a.chance < b.chance;
  });
  nb::object plans = nb::steal(PyTuple_New(static_cast<Py_ssize_t>(keep)));
  for (std::size_t i = 0; i < keep; ++i) {
    PyTuple_SET_ITEM(plans.ptr(), static_cast<Py_ssize_t>(i), make(candidates_[scored_[i].index], actions_[scored_[i].index]).release().ptr());
  }
  return plans;
}

nb::list QuestionPlanner::options(nb::handle question, nb::handle costs) {
  prepare(question, costs);
  if (candidates_.size() != 1) throw nb::value_error("the options are those of one candidate");
  std::vector<plan::Action> all;
  price(costs, 0, &all);
  nb::list plans;
  for (const plan::Action& action : all) plans.append(make(candidates_.front(), action));
  return plans;
}

void QuestionPlanner::prepare(nb::handle question, nb::handle costs) {
  models_.bound();
  read(question);
  if (candidates_.empty()) throw nb::value_error("a decision needs candidates");
  resolve(costs);
  choose_sources();
}

void QuestionPlanner::read(nb::handle question) {
  tokens_.clear();
  candidates_.clear();
  sources_.clear();
  fingerprints_.clear();
  spans_.clear();
  ends_.clear();
  for_each(fields_.prompt_tokens.of(question), [&](nb::handle count) { tokens_.push_back(to_integer(count)); });
  const nb::object slo = fields_.slo_tpot_s.of(question);
  request_ = {tokens_, fields_.output_tokens.integer(question),
              slo.is_none() ? std::nullopt : std::optional(to_real(slo)), fields_.pressure.real(question)};
  for_each(fields_.candidates.of(question), [&](nb::handle one) { read_candidate(nb::borrow(one)); });
  if (tokens_.size() == 1) {
    for_each(fields_.sources.of(question), [&](nb::handle one) { read_source(nb::borrow(one)); });
  }
}

void QuestionPlanner::read_candidate(nb::object object) {
  AskedCandidate& one = candidates_.emplace_back();
  one.name = fields_.worker.of(object);
  one.first_residence = ends_.size();
  for_each(fields_.residence.of(object),
           [&](nb::handle each) { ends_.push_back(residences_.read(each, spans_)); });
  if (ends_.size() - one.first_residence != tokens_.size()) throw nb::value_error("one residence per prompt");
  // Each candidate is another rank, mostly of another worker; only sources are compared with them.
  one.values = {.worker = 0,
                .fingerprint = number(fingerprints_, fields_.fingerprint.of(object)),
                .costs = nullptr,
                .block_size = fields_.block_size.integer(object),
                .chunk_blocks = fields_.chunk_blocks.integer(object),
                .residence = {},
                .queue_s = fields_.queue_s.real(object),
                .decodes = fields_.decodes.integer(object),
                .pulls = fields_.pulls.real(object),
                .trust = fields_.trust.real(object),
                .can_pull = fields_.can_pull.of(object).is(Py_True),
                .extension = fields_.extension.of(object).is(Py_True),
                .fresh_tokens = fields_.fresh_tokens.integer(object),
                .resident_tokens = fields_.resident_tokens.integer(object),
                .kv_capacity_tokens = fields_.kv_capacity_tokens.integer(object)};
  if (one.values.block_size < 1 || one.values.chunk_blocks < 1) throw nb::value_error("blocks and chunks are not empty");
  one.object = std::move(object);
}

void QuestionPlanner::read_source(nb::object object) {
  AskedSource& one = sources_.emplace_back();
  one.name = fields_.worker.of(object);
  const ResidenceEnds ends = residences_.read(fields_.residence.of(object), spans_);
  one.ram_start = ends.hbm;
  one.ram_end = ends.ram;
  one.values = {0, number(fingerprints_, fields_.fingerprint.of(object)), fields_.pulls.real(object),
                fields_.trust.real(object), {}, fields_.p2p.of(object).is(Py_True),
                fields_.extension.of(object).is(Py_True)};
  one.object = std::move(object);
}

// Few are different, and mostly they are one object.
std::uint32_t QuestionPlanner::number(std::vector<nb::object>& known, nb::object value) const {
  for (std::uint32_t i = 0; i < known.size(); ++i) {
    if (known[i].is(value) || known[i].equal(value)) return i;
  }
  known.push_back(std::move(value));
  return static_cast<std::uint32_t>(known.size() - 1);
}

// Now that nothing grows any more, spans, residences and constants can be pointed at.
void QuestionPlanner::resolve(nb::handle costs) {
  residence_.clear();
  for (const ResidenceEnds& ends : ends_) residence_.push_back(ends.over(spans_));
  const nb::object model_for = fields_.model_for.of(costs);
  for (AskedCandidate& one : candidates_) {
    one.values.residence = std::span(residence_).subspan(one.first_residence, tokens_.size());
    one.values.costs = &models_.get(model_for(one.name));
  }
  for (AskedSource& one : sources_) {
    one.values.ram = std::span(spans_).subspan(one.ram_start, one.ram_end - one.ram_start);
  }
}

void QuestionPlanner::choose_sources() {
  tried_.clear();
  workers_.clear();
  for (const AskedSource& one : sources_) tried_.push_back(one.values);
  tried_order_ = plan::most_useful(tried_);
  tried_.clear();
  for (const std::uint32_t index : tried_order_) {
    tried_.push_back(sources_[index].values);
    tried_.back().worker = number(workers_, sources_[index].name);
  }
}

void QuestionPlanner::price(nb::handle costs, std::uint64_t seed, std::vector<plan::Action>* all) {
  actions_.clear();
  scored_.clear();
  const nb::object link = fields_.link.of(costs);
  std::array<plan::Pair, plan::kMaxSources> pairs;
  for (AskedCandidate& one : candidates_) {
    if ((one.values.can_pull || one.values.extension) && !tried_.empty()) {
      const nb::object sessions = fields_.sessions.of(one.object);
      one.values.worker = kNone;
      for (std::size_t i = 0; i < tried_.size(); ++i) {
        const nb::object& source = sources_[tried_order_[i]].name;
        if (source.is(one.name) || source.equal(one.name)) {
          one.values.worker = tried_[i].worker;
        } else if (tried_[i].fingerprint == one.values.fingerprint) {
          pairs[i] = {read_link(link(source, one.name)), contains(sessions, source)};
        }
      }
    }
    actions_.push_back(plan::best_action(settings_, request_, one.values, tried_, pairs, scratch_, all));
    seed += 0x9e3779b97f4a7c15ULL;  // SplitMix64
    scored_.push_back({actions_.back().score_s, mix64(seed), scored_.size()});
  }
}

nb::object QuestionPlanner::make(const AskedCandidate& one, const plan::Action& action) const {
  PlanFacts facts{.worker = one.name,
                  .dp_rank = fields_.dp_rank.integer(one.object),
                  .prompt_blocks = count_blocks(tokens_, one.values.block_size),
                  .decodes = one.values.decodes,
                  .other_pulls = 0,
                  .connected = true,
                  .source = nb::none(),
                  .pulls = nb::none()};
  facts.tell_of(types_, action, [&](std::size_t index) -> SourceFacts {
    const AskedSource& source = sources_[tried_order_[index]];
    return {source.object, std::max(one.values.pulls, source.values.pulls),
            contains(fields_.sessions.of(one.object), source.name)};
  });
  return make_plan(types_, one.values, action, std::move(facts));
}

}  // namespace pointsman::py
