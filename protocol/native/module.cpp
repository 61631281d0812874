// The module `_native`: which variants this processor has, and every kernel as a function of
// numbers, addresses among them. Nothing here checks sizes: their callers in Python do.
#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030b0000
#include <Python.h>

#include <new>
#include <string.h>
#include <tuple>
#include <type_traits>
#include <utility>

#include "lane.h"
#include "message.h"
#include "variants.h"

namespace {

const Kernels* active = &portable::table;

// ---- numbers from Python, by the parameter that they are for

template <class T>
T from_python(PyObject* object) {
  if constexpr (std::is_pointer_v<T>)
    return static_cast<T>(PyLong_AsVoidPtr(object));
  else if constexpr (std::is_floating_point_v<T>)
    return static_cast<T>(PyFloat_AsDouble(object));
  else
    return static_cast<T>(PyLong_AsLongLong(object));
}

PyObject* to_python(int64_t value) { return PyLong_FromLongLong(value); }
PyObject* to_python(bool value) { return PyBool_FromLong(value); }
PyObject* to_python(const void* value) { return PyLong_FromVoidPtr(const_cast<void*>(value)); }

// Convert the arguments, call without the interpreter's lock, convert the result.
template <class Result, class... Parameter, size_t... I>
PyObject* call(Result (*function)(Parameter...), PyObject* const* arguments, Py_ssize_t count,
               std::index_sequence<I...>) {
  if (count != sizeof...(Parameter))
    return PyErr_Format(PyExc_TypeError, "got %zd arguments, expected %zd", count,
                        static_cast<Py_ssize_t>(sizeof...(Parameter)));
  std::tuple<Parameter...> numbers{from_python<Parameter>(arguments[I])...};
  if (PyErr_Occurred()) return nullptr;
  bool memory = true;
  using Kept = std::conditional_t<std::is_void_v<Result>, int, Result>;
  Kept result{};
  PyThreadState* state = PyEval_SaveThread();
  try {
    if constexpr (std::is_void_v<Result>)
      function(std::get<I>(numbers)...);
    else
      result = function(std::get<I>(numbers)...);
  } catch (const std::bad_alloc&) {
    memory = false;
  }
  PyEval_RestoreThread(state);
  if (!memory) return PyErr_NoMemory();
  if constexpr (std::is_void_v<Result>) {
    Py_INCREF(Py_None);
    return Py_None;
  } else {
    return to_python(result);
  }
}

template <class Result, class... Parameter>
PyObject* call(Result (*function)(Parameter...), PyObject* const* arguments, Py_ssize_t count) {
  return call(function, arguments, count, std::index_sequence_for<Parameter...>());
}

template <auto Function>
PyObject* plain(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
  return call(Function, arguments, count);
}

template <auto Member>
PyObject* kernel(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
  return call(active->*Member, arguments, count);
}

// ---- variants ------------------------------------------------------------------------------------

PyObject* names(PyObject*, PyObject* const*, Py_ssize_t) {
  int count;
  const Variant* all = variants(&count);
  PyObject* found = PyList_New(0);
  for (int i = 0; found && i < count; i++) {
    if (!all[i].here) continue;
    PyObject* name = PyUnicode_FromString(all[i].kernels->name);
    if (!name || PyList_Append(found, name)) Py_CLEAR(found);
    Py_XDECREF(name);
  }
  return found;
}

PyObject* use(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
  int number;
  const Variant* all = variants(&number);
  const char* wanted = count == 1 ? PyUnicode_AsUTF8AndSize(arguments[0], nullptr) : nullptr;
  for (int i = 0; wanted && i < number; i++)
    if (all[i].here && !strcmp(all[i].kernels->name, wanted)) {
      active = all[i].kernels;
      Py_INCREF(Py_None);
      return Py_None;
    }
  if (!PyErr_Occurred())
    PyErr_SetString(PyExc_ValueError, "native: got no variant that this processor has");
  return nullptr;
}

#define METHOD(NAME, ...) \
  {NAME, reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(__VA_ARGS__)), METH_FASTCALL, nullptr}
#define KERNEL(NAME) METHOD(#NAME, kernel<&Kernels::NAME>)

PyMethodDef methods[] = {
    METHOD("variants", names),
    METHOD("use", use),
    METHOD("pool_new", plain<pool_new>),
    METHOD("pool_free", plain<pool_free>),
    METHOD("lane_look", plain<lane_look>),
    METHOD("lane_publish", plain<lane_publish>),
    METHOD("lane_sleep", plain<lane_sleep>),
    METHOD("lane_put", plain<lane_put>),
    METHOD("lane_take", plain<lane_take>),
    METHOD("stream_put", plain<stream_put>),
    METHOD("stream_take", plain<stream_take>),
    KERNEL(draw),
    KERNEL(encode),
    KERNEL(expect),
    KERNEL(decode),
    KERNEL(product),
    KERNEL(linear),
    KERNEL(norm),
    KERNEL(activate),
    KERNEL(residual),
    KERNEL(rope),
    KERNEL(append),
    KERNEL(attention),
    {nullptr, nullptr, 0, nullptr},
};

PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_native", nullptr, 0, methods,
                          nullptr,               nullptr,   nullptr, nullptr};

}  // namespace

PyMODINIT_FUNC PyInit__native() {
#if defined(__x86_64__)
  __builtin_cpu_init();
#endif
  return PyModule_Create(&definition);
}
