// SPDX-License-Identifier: Apache-2.0
// Python values made and read without running Python: a plan is a frozen dataclass, whose own constructor takes
// longer than pricing a dozen candidates.
#pragma once

#include <nanobind/nanobind.h>

#include <initializer_list>
#include <string>
#include <vector>

namespace pointsman::py {

namespace nb = nanobind;

// A dataclass with slots. Fields that are not named keep their defaults.
class SlottedType {
 public:
  // Raises TypeError for a type without slots, a name that is no field, or a field that is neither named nor defaulted.
  SlottedType(nb::handle type, std::initializer_list<const char*> names);
  // Values in the order of the names; takes their references.
  [[nodiscard]] nb::object make(std::initializer_list<nb::object> values) const;

 private:
  struct Default {
    nb::object slot;
    nb::object value;
  };
  nb::object type_;
  std::vector<nb::object> slots_;
  std::vector<Default> defaults_;
};

// A NamedTuple. Fields that are not named keep their defaults.
class TupleType {
 public:
  TupleType(nb::handle type, std::initializer_list<const char*> names);
  [[nodiscard]] nb::object make(std::initializer_list<nb::object> values) const;

 private:
  nb::object type_;
  std::vector<std::size_t> positions_;
  std::vector<nb::object> defaults_;  // by position
};

inline nb::object number(double value) { return nb::steal(PyFloat_FromDouble(value)); }
inline nb::object boolean(bool value) { return nb::borrow(value ? Py_True : Py_False); }
inline nb::object number(std::int64_t value) { return nb::steal(PyLong_FromLongLong(value)); }

// Reads one attribute of many objects: the name is interned once.
class Field {
 public:
  explicit Field(const char* name) : name_(nb::steal(PyUnicode_InternFromString(name))) {}
  [[nodiscard]] nb::object of(nb::handle object) const;
  [[nodiscard]] std::int64_t integer(nb::handle object) const;
  [[nodiscard]] double real(nb::handle object) const;

 private:
  nb::object name_;
};

std::int64_t to_integer(nb::handle value);
double to_real(nb::handle value);

// Visits the items of a list or tuple, or of a list made of another iterable.
template <typename Visit>
void for_each(nb::handle iterable, Visit&& visit) {
  const nb::object items = nb::steal(PySequence_Fast(iterable.ptr(), "a sequence is needed"));
  if (!items.is_valid()) nb::raise_python_error();
  for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(items.ptr()); ++i) {
    visit(nb::handle(PySequence_Fast_GET_ITEM(items.ptr(), i)));
  }
}

}  // namespace pointsman::py
