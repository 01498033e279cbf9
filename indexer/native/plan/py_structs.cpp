// SPDX-License-Identifier: Apache-2.0
#include "py_structs.hpp"

#include <nanobind/stl/string.h>

#include <algorithm>

namespace pointsman::py {
namespace {

nb::object checked(PyObject* result) {
  if (result == nullptr) nb::raise_python_error();
  return nb::steal(result);
}

}  // namespace

SlottedType::SlottedType(nb::handle type, std::initializer_list<const char*> names) : type_(nb::borrow(type)) {
  const nb::object missing = nb::module_::import_("dataclasses").attr("MISSING");
  const nb::dict fields = nb::cast<nb::dict>(type.attr("__dataclass_fields__"));
  for (const char* name : names) {
    if (!fields.contains(name)) throw nb::type_error(name);
    slots_.push_back(type.attr(name));
    if (Py_TYPE(slots_.back().ptr()) != &PyMemberDescr_Type) throw nb::type_error(name);
  }
  for (const auto [key, field] : fields) {
    const std::string name = nb::cast<std::string>(key);
    if (std::find(names.begin(), names.end(), name) != names.end()) continue;
    nb::object value = field.attr("default");
    if (value.is(missing)) throw nb::type_error(name.c_str());
    defaults_.push_back({type.attr(name.c_str()), std::move(value)});
  }
}

nb::object SlottedType::make(std::initializer_list<nb::object> values) const {
  auto* type = reinterpret_cast<PyTypeObject*>(type_.ptr());
  nb::object made = checked(type->tp_alloc(type, 0));
  const auto set = [&](nb::handle slot, nb::handle value) {
    if (Py_TYPE(slot.ptr())->tp_descr_set(slot.ptr(), made.ptr(), value.ptr()) != 0) nb::raise_python_error();
  };
  std::size_t i = 0;
  for (const nb::object& value : values) set(slots_[i++], value);
  for (const Default& one : defaults_) set(one.slot, one.value);
  return made;
}

TupleType::TupleType(nb::handle type, std::initializer_list<const char*> names) : type_(nb::borrow(type)) {
  const nb::object fields = type.attr("_fields");
  const nb::object defaults = type.attr("_field_defaults");
  for (const nb::handle field : fields) {
    defaults_.push_back(nb::borrow(defaults.attr("get")(field)));
  }
  for (const char* name : names) {
    positions_.push_back(nb::cast<std::size_t>(fields.attr("index")(name)));
  }
}

nb::object TupleType::make(std::initializer_list<nb::object> values) const {
  auto* type = reinterpret_cast<PyTypeObject*>(type_.ptr());
  nb::object made = checked(type->tp_alloc(type, static_cast<Py_ssize_t>(defaults_.size())));
  std::size_t i = 0;
  for (const nb::object& value : values) {
    PyTuple_SET_ITEM(made.ptr(), static_cast<Py_ssize_t>(positions_[i++]), nb::object(value).release().ptr());
  }
  for (std::size_t position = 0; position < defaults_.size(); ++position) {
    if (PyTuple_GET_ITEM(made.ptr(), static_cast<Py_ssize_t>(position)) == nullptr) {
      PyTuple_SET_ITEM(made.ptr(), static_cast<Py_ssize_t>(position), nb::object(defaults_[position]).release().ptr());
    }
  }
  return made;
}

nb::object Field::of(nb::handle object) const { return checked(PyObject_GetAttr(object.ptr(), name_.ptr())); }

std::int64_t Field::integer(nb::handle object) const { return to_integer(of(object)); }

double Field::real(nb::handle object) const { return to_real(of(object)); }

std::int64_t to_integer(nb::handle value) {
  const long long result = PyLong_AsLongLong(value.ptr());
  if (result == -1 && PyErr_Occurred() != nullptr) nb::raise_python_error();
  return result;
}

double to_real(nb::handle value) {
  const double result = PyFloat_AsDouble(value.ptr());
  if (result == -1.0 && PyErr_Occurred() != nullptr) nb::raise_python_error();
  return result;
}

}  // namespace pointsman::py
