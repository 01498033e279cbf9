// SPDX-License-Identifier: Apache-2.0
// What bindings.cpp adds to the module for POST /query.
#pragma once

#include <nanobind/nanobind.h>

namespace pointsman {

void bind_desk(nanobind::module_& m);

}  // namespace pointsman
