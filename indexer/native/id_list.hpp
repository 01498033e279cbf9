// SPDX-License-Identifier: Apache-2.0
// Token ids out of a JSON array, without a Python object for each.
#pragma once

#include <cstdint>
#include <string_view>
#include <vector>

namespace pointsman {

// Appends the numbers of a JSON array (RFC 8259) of whole numbers below 2^32. False, with some of them appended, where
// the text is anything else: a sign, a fraction, an exponent, a leading zero, a larger number, another type, bytes
// behind the array. An empty array is one.
bool parse_ids(std::string_view text, std::vector<std::uint32_t>& ids);

}  // namespace pointsman
