// SPDX-License-Identifier: Apache-2.0
// What bindings.cpp adds to the module from this folder.
#pragma once

#include <nanobind/nanobind.h>

namespace pointsman {

void bind_board(nanobind::module_& m);
void bind_residents(nanobind::module_& m);
void bind_fleet(nanobind::module_& m);
void bind_questions(nanobind::module_& m);

}  // namespace pointsman
