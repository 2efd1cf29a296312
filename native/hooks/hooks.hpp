// What the recorder's hooks in C++ share: see module.cpp.

#pragma once

#define Py_LIMITED_API 0x030A0000
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <time.h>

#include <cstdint>
#include <new>
#include <string>
#include <vector>

namespace fullwire {

// The kinds of notes that are made here, as in `Note` of recorder/inside/journal.py.
constexpr std::int64_t ISSUE = 5, END = 6, BEFORE_FORWARD = 17, DELAY = 18;

inline std::int64_t now_ns(clockid_t clock) {
    timespec at{};
    clock_gettime(clock, &at);
    return std::int64_t{at.tv_sec} * 1'000'000'000 + at.tv_nsec;
}

// A reference that is given back at the end of its scope.
class Owned {
  public:
    explicit Owned(PyObject* object) : object_(object) {}
    Owned(const Owned&) = delete;
    Owned& operator=(const Owned&) = delete;
    ~Owned() { Py_XDECREF(object_); }
    PyObject* get() const { return object_; }
    explicit operator bool() const { return object_ != nullptr; }

  private:
    PyObject* object_;
};

struct Row {
    std::int64_t kind, number, time_ns, rest;
};

// The notes that wait for the journal's next write; an object of Python.
struct Notes {
    PyObject_HEAD
    std::vector<Row> rows;
    std::string passes;
    std::size_t most, most_passes, pass_count, missed;
    std::int64_t spent_ns;
    bool takes;  // no more notes are taken once it is closed

    void add(std::int64_t kind, std::int64_t number, std::int64_t time_ns, std::int64_t rest) {
        if (!takes) return;
        if (rows.size() >= most) {
            ++missed;
            return;
        }
        try {
            rows.push_back({kind, number, time_ns, rest});
        } catch (const std::bad_alloc&) {  // the job goes on
            ++missed;
        }
    }
};

inline Notes* notes_of(PyObject* self) { return reinterpret_cast<Notes*>(self); }

// Says whether an object is of this type; each time the module is loaded it makes another one.
bool is_notes(PyObject* object);

// Returns a new reference to the notes that others add to; anything else is an error.
inline PyObject* checked_notes(PyObject* object) {
    if (object != nullptr && is_notes(object)) return Py_NewRef(object);
    if (!PyErr_Occurred()) PyErr_SetString(PyExc_TypeError, "expected the notes of this module");
    return nullptr;
}

// Reads whole numbers from arguments; a wrong number of them, or another type, is an error.
template <std::size_t Count>
bool read_numbers(PyObject* const* arguments, Py_ssize_t given, std::int64_t (&numbers)[Count]) {
    if (given != static_cast<Py_ssize_t>(Count)) {
        PyErr_Format(PyExc_TypeError, "expected %zu whole numbers, got %zd", Count, given);
        return false;
    }
    for (std::size_t place = 0; place < Count; ++place) {
        numbers[place] = PyLong_AsLongLong(arguments[place]);
        if (numbers[place] == -1 && PyErr_Occurred()) return false;
    }
    return true;
}

// Makes an empty object of a type that was made at run time.
template <typename Type>
Type* made(PyTypeObject* type) {
    const auto allocate = reinterpret_cast<allocfunc>(PyType_GetSlot(type, Py_tp_alloc));
    return reinterpret_cast<Type*>(allocate(type, 0));
}

// Returns such an object, or frees it where a part of it could not be made.
template <typename Type>
PyObject* made_whole(Type* made_now, bool is_whole) {
    auto* object = reinterpret_cast<PyObject*>(made_now);
    if (!is_whole) Py_DECREF(object);
    return is_whole ? object : nullptr;
}

// Frees such an object.
inline void release(PyObject* self) {
    PyTypeObject* type = Py_TYPE(self);
    reinterpret_cast<freefunc>(PyType_GetSlot(type, Py_tp_free))(self);
    Py_DECREF(reinterpret_cast<PyObject*>(type));
}

inline PyCFunction fast(PyObject* (*function)(PyObject*, PyObject* const*, Py_ssize_t)) {
    return reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(function));
}

// The types, as the module adds them.
PyObject* notes_type();
PyObject* buckets_type();
PyObject* short_delay_type();
PyObject* before_forward_type();

// Takes torch's own way to call a function at the end of a future.
PyObject* use_torch(PyObject* module, PyObject* add_done_callback);

}  // namespace fullwire
