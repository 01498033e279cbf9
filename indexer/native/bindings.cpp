// SPDX-License-Identifier: Apache-2.0
// The Python face of the core: converts arguments, releases the GIL, nothing else.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/string_view.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cstring>
#include <system_error>
#include <tuple>

#include "bind_batches.hpp"
#include "bind_desk.hpp"
#include "id_list.hpp"
#include "index.hpp"
#include "reader.hpp"
#include "plan/bind.hpp"

namespace nb = nanobind;
using namespace nb::literals;
using namespace pointsman;

namespace {

using Tokens = nb::ndarray<const std::uint32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

HashKey key_from(const nb::bytes& key) {
  if (key.size() != 16) throw nb::value_error("the hash key has 16 bytes");
  HashKey result;
  std::memcpy(&result.k0, key.c_str(), 8);
  std::memcpy(&result.k1, key.c_str() + 8, 8);
  return result;
}

std::vector<std::uint64_t> hashes_from(const nb::bytes& hashes) {
  if (hashes.size() % 8 != 0) throw nb::value_error("block hashes are 8 bytes each");
  std::vector<std::uint64_t> result(hashes.size() / 8);
  if (!result.empty()) std::memcpy(result.data(), hashes.c_str(), hashes.size());
  return result;
}

template <typename Index>
nb::bytes hash_blocks(const Index& index, const Tokens& tokens, std::size_t block_size, const std::string& model,
                      const std::string& lora, const std::vector<std::string>& first_block_keys) {
  if (block_size == 0) throw nb::value_error("block_size must be at least 1");
  std::vector<std::uint64_t> hashes;
  {
    const nb::gil_scoped_release release;
    std::vector<std::uint8_t> extra;
    for (const std::string& text : first_block_keys) append_extra_text(extra, text);
    hashes.reserve(tokens.shape(0) / block_size);
    index.chain().blocks(index.chain().root(model, lora), {tokens.data(), tokens.shape(0)}, block_size, extra, hashes);
  }
  return nb::bytes(reinterpret_cast<const char*>(hashes.data()), hashes.size() * 8);
}

nb::object packed_ids(const nb::bytes& text) {
  const std::string_view view(text.c_str(), text.size());
  std::vector<std::uint32_t> ids;
  ids.reserve(view.size() / 2);
  if (!parse_ids(view, ids)) return nb::none();
  return nb::bytes(reinterpret_cast<const char*>(ids.data()), ids.size() * 4);
}

nb::list tuples_of(std::vector<Run>& runs) {
  std::ranges::sort(runs, {}, [](const Run& run) { return std::tuple(run.slot, run.tier, run.start, run.demoting); });
  nb::list result;
  for (const Run& run : runs) {
    const int doubt = run.demoting ? 2 : run.doubtful ? 1 : 0;
    result.append(nb::make_tuple(run.slot, run.tier, run.start, run.end, doubt));
  }
  return result;
}

nb::list match(PrefixIndex& index, const nb::bytes& hashes, double now_s) {
  const std::vector<std::uint64_t> query = hashes_from(hashes);
  std::vector<Run> runs;
  {
    const nb::gil_scoped_release release;
    index.match(query, runs, now_s);
  }
  return tuples_of(runs);
}

nb::tuple match_elsewhere(IndexReader& reader, const nb::bytes& hashes, double now_s) {
  const std::vector<std::uint64_t> query = hashes_from(hashes);
  std::vector<Run> runs;
  std::uint64_t generation = 0;
  {
    const nb::gil_scoped_release release;
    generation = reader.match(query, runs, now_s);
  }
  return nb::make_tuple(generation, tuples_of(runs));
}

nb::tuple slots_elsewhere(IndexReader& reader) {
  const auto [generation, entries] = reader.slots();
  nb::list result;
  for (const SlotEntry& entry : entries) {
    result.append(nb::make_tuple(entry.slot, nb::bytes(entry.name.data(), entry.name.size()), entry.suspect));
  }
  return nb::make_tuple(generation, result);
}

SlotCounts counts_elsewhere(IndexReader& reader, SlotId slot) {
  const auto entry = reader.slot(slot);
  return entry ? entry->counts : SlotCounts{};
}

ApplyCounts apply(PrefixIndex& index, const std::vector<SlotId>& ranks, std::uint32_t default_rank, SlotId store,
                  const nb::bytes& payload, double now_s) {
  const auto* data = reinterpret_cast<const std::uint8_t*>(payload.c_str());
  const std::size_t size = payload.size();
  const nb::gil_scoped_release release;
  return index.apply(ranks, default_rank, store, data, size, now_s);
}

nb::list blocks(const PrefixIndex& index, SlotId slot) {
  nb::list result;
  for (const auto& [hash, tiers] : index.blocks(slot)) result.append(nb::make_tuple(hash, tiers));
  return result;
}

nb::bytes export_slot(const PrefixIndex& index, SlotId slot) {
  std::vector<std::uint8_t> records;
  {
    const nb::gil_scoped_release release;
    records = index.export_slot(slot);
  }
  return nb::bytes(reinterpret_cast<const char*>(records.data()), records.size());
}

std::size_t import_slot(PrefixIndex& index, SlotId slot, const nb::bytes& records, std::uint32_t block_size) {
  const auto* data = reinterpret_cast<const std::uint8_t*>(records.c_str());
  const std::size_t size = records.size();
  const nb::gil_scoped_release release;
  return index.import_slot(slot, {data, size}, block_size);
}

}  // namespace

NB_MODULE(_core, m) {
  m.attr("NO_SLOT") = kNoSlot;

  nb::register_exception_translator([](const std::exception_ptr& thrown, void*) {
    try {
      std::rethrow_exception(thrown);
    } catch (const std::system_error& error) {
      const nb::object value = nb::make_tuple(error.code().value(), error.what());
      PyErr_SetObject(PyExc_OSError, value.ptr());
    }
  });

  nb::class_<ApplyCounts>(m, "ApplyCounts")
      .def_ro("stored", &ApplyCounts::stored)
      .def_ro("removed", &ApplyCounts::removed)
      .def_ro("clears", &ApplyCounts::clears)
      .def_ro("detached", &ApplyCounts::detached)
      .def_ro("joined", &ApplyCounts::joined)
      .def_ro("unidentified", &ApplyCounts::unidentified)
      .def_ro("unknown_removals", &ApplyCounts::unknown_removals)
      .def_ro("dropped_waiting", &ApplyCounts::dropped_waiting)
      .def_ro("conflicts", &ApplyCounts::conflicts)
      .def_ro("malformed_events", &ApplyCounts::malformed_events)
      .def_ro("unknown_events", &ApplyCounts::unknown_events)
      .def_ro("unknown_medium_events", &ApplyCounts::unknown_medium_events)
      .def_ro("sparse_events", &ApplyCounts::sparse_events)
      .def_ro("evicted", &ApplyCounts::evicted)
      .def_ro("malformed_batch", &ApplyCounts::malformed_batch);

  nb::class_<SlotCounts>(m, "SlotCounts")
      .def_prop_ro("hbm", [](const SlotCounts& c) { return c.blocks[0]; })
      .def_prop_ro("ram", [](const SlotCounts& c) { return c.blocks[1]; })
      .def_prop_ro("storage", [](const SlotCounts& c) { return c.blocks[2]; })
      .def_ro("doubtful_ram", &SlotCounts::doubtful_ram)
      .def_ro("unidentified", &SlotCounts::unidentified)
      .def_ro("detached", &SlotCounts::detached)
      .def_ro("remembered", &SlotCounts::remembered)
      .def_ro("demoting", &SlotCounts::demoting)
      .def_ro("block_size", &SlotCounts::block_size);

  nb::class_<PrefixIndex>(m, "PrefixIndex")
      .def(
          "__init__",
          [](PrefixIndex* self, const nb::bytes& key, std::size_t detached, std::size_t unidentified,
             std::size_t remembered, std::size_t blocks, const std::string& path) {
            new (self) PrefixIndex(key_from(key), Limits{detached, unidentified, remembered, blocks}, path);
          },
          "key"_a, "detached_blocks"_a, "unidentified_blocks"_a, "remembered_blocks"_a, "max_blocks"_a, "path"_a = "")
      .def("open", &PrefixIndex::open, "model"_a, "plain"_a, "name"_a = "", "grace_s"_a = 0.0)
      .def("retire", &PrefixIndex::retire, "slot"_a)
      .def("suspect", &PrefixIndex::suspect, "slot"_a, "on"_a)
      .def("publish", &PrefixIndex::publish)
      .def("alive", &PrefixIndex::alive, "slot"_a)
      .def("clear", &PrefixIndex::clear, "slot"_a, nb::call_guard<nb::gil_scoped_release>())
      .def("apply", &apply, "ranks"_a, "default_rank"_a, "store"_a, "payload"_a, "now_s"_a = 0.0)
      .def("hash_blocks", &hash_blocks<PrefixIndex>, "tokens"_a, "block_size"_a, "model"_a, "lora"_a, "first_block_keys"_a)
      .def("apply_many", &apply_payloads, "ranks"_a, "default_rank"_a, "store"_a, "payloads"_a, "now_s"_a = 0.0)
      .def("match", &match, "hashes"_a, "now_s"_a = 0.0)
      .def("counts", &PrefixIndex::counts, "slot"_a, nb::call_guard<nb::gil_scoped_release>())
      .def("blocks", &blocks, "slot"_a)
      .def_prop_ro("export_format", [](const PrefixIndex&) { return "native-2"; })
      .def("export_slot", &export_slot, "slot"_a)
      .def("import_slot", &import_slot, "slot"_a, "records"_a, "block_size"_a)
      .def("sweep", &PrefixIndex::sweep, "steps"_a, "now_s"_a = 0.0, nb::call_guard<nb::gil_scoped_release>())
      .def("check", &PrefixIndex::check)
      .def_prop_ro("version", &PrefixIndex::version)
      .def_prop_ro("distinct_blocks", &PrefixIndex::distinct_blocks)
      .def_prop_ro("memory_bytes", &PrefixIndex::memory_bytes);

  nb::class_<IndexReader>(m, "IndexReader")
      .def(
          "__init__",
          [](IndexReader* self, const std::string& path, const nb::bytes& key) {
            new (self) IndexReader(path, key_from(key));
          },
          "path"_a, "key"_a)
      .def("hash_blocks", &hash_blocks<IndexReader>, "tokens"_a, "block_size"_a, "model"_a, "lora"_a,
           "first_block_keys"_a)
      .def("match", &match_elsewhere, "hashes"_a, "now_s"_a = 0.0)
      .def("slots", &slots_elsewhere)
      .def("counts", &counts_elsewhere, "slot"_a)
      .def("refresh", &IndexReader::refresh)
      .def_prop_ro("generation", &IndexReader::generation)
      .def_prop_ro("version", &IndexReader::version)
      .def_prop_ro("distinct_blocks", &IndexReader::distinct_blocks);

  m.def("parse_ids", &packed_ids, "text"_a);
  bind_batches(m);
  bind_desk(m);
  bind_board(m);
  bind_residents(m);
  bind_fleet(m);
  bind_questions(m);
}
