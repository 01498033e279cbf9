// SPDX-License-Identifier: Apache-2.0
// Free places of the arrays of a load board, linked through a field of each.
#pragma once

#include "board_state.hpp"

namespace pointsman::board {

// A free place, the one given back last; kNone where all are taken.
template <auto Link, typename Places>
std::uint32_t take(Pool& pool, Places& places) {
  if (pool.free != kNone) {
    const std::uint32_t place = pool.free;
    pool.free = places[place].*Link;
    return place;
  }
  if (pool.begun == places.size()) return kNone;
  return pool.begun++;
}

template <auto Link, typename Places>
void put(Pool& pool, Places& places, std::uint32_t place) {
  places[place].*Link = pool.free;
  pool.free = place;
}

// All free places anew, those with low numbers to be taken first.
template <auto Link, typename Places, typename IsFree>
void collect(Pool& pool, Places& places, const IsFree& is_free) {
  pool.free = kNone;
  for (std::uint32_t place = pool.begun; place-- > 0;) {
    if (is_free(places[place])) put<Link>(pool, places, place);
  }
}

}  // namespace pointsman::board
