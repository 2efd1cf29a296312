// The notes that wait, and how they are packed: `Notes` of recorder/inside/notes.py.

#include "hooks.hpp"

#include <algorithm>
#include <utility>

namespace fullwire {
namespace {

// Appends one column of whole numbers, in 32 bits if all of them fit.
template <typename Value>
void put_column(std::string& content, std::size_t count, Value value) {
    bool is_narrow = true;
    for (std::size_t place = 0; place < count; ++place) {
        const std::int64_t each = value(place);
        is_narrow = is_narrow && each == std::int64_t{static_cast<std::int32_t>(each)};
    }
    content += is_narrow ? 'i' : 'q';
    for (std::size_t place = 0; place < count; ++place) {
        const std::int64_t each = value(place);
        const auto narrow = static_cast<std::int32_t>(each);
        if (is_narrow) {
            content.append(reinterpret_cast<const char*>(&narrow), sizeof narrow);
        } else {
            content.append(reinterpret_cast<const char*>(&each), sizeof each);
        }
    }
}

template <typename Value>
void put(std::string& content, Value value) {
    content.append(reinterpret_cast<const char*>(&value), sizeof value);
}

// Ends a call whose numbers could not be read. A note beyond 64 bits is missed: the job goes on.
PyObject* unread(PyObject* self) {
    if (!PyErr_ExceptionMatches(PyExc_OverflowError)) return nullptr;
    PyErr_Clear();
    if (notes_of(self)->takes) ++notes_of(self)->missed;
    Py_RETURN_NONE;
}

PyObject* notes_add(PyObject* self, PyObject* const* arguments, Py_ssize_t given) {
    std::int64_t numbers[4];
    if (!read_numbers(arguments, given, numbers)) return unread(self);
    notes_of(self)->add(numbers[0], numbers[1], numbers[2], numbers[3]);
    Py_RETURN_NONE;
}

PyObject* notes_add_interval(PyObject* self, PyObject* const* arguments, Py_ssize_t given) {
    std::int64_t numbers[4];
    if (!read_numbers(arguments, given, numbers)) return unread(self);
    notes_of(self)->add(numbers[0], numbers[1], numbers[2], numbers[3] - numbers[2]);
    Py_RETURN_NONE;
}

PyObject* notes_add_now(PyObject* self, PyObject* const* arguments, Py_ssize_t given) {
    std::int64_t numbers[2];
    if (!read_numbers(arguments, given, numbers)) return unread(self);
    notes_of(self)->add(numbers[0], numbers[1], now_ns(CLOCK_MONOTONIC), 0);
    Py_RETURN_NONE;
}

// Adds all rows or none: no other thread runs in between.
PyObject* notes_add_all(PyObject* self, PyObject* rows) {
    Notes* notes = notes_of(self);
    const Py_ssize_t count = PySequence_Size(rows);
    if (count < 0) return nullptr;
    try {
        std::vector<Row> read;
        for (Py_ssize_t place = 0; place < count; ++place) {
            const Owned row(PySequence_GetItem(rows, place));
            if (!row) return nullptr;
            long long kind = 0, number = 0, time_ns = 0, rest = 0;
            if (!PyArg_ParseTuple(row.get(), "LLLL", &kind, &number, &time_ns, &rest)) {
                return unread(self);
            }
            read.push_back({kind, number, time_ns, rest});
        }
        if (notes->takes && notes->rows.size() + read.size() <= notes->most) {
            notes->rows.insert(notes->rows.end(), read.begin(), read.end());
            Py_RETURN_NONE;
        }
    } catch (const std::bad_alloc&) {  // the job goes on
    }
    if (notes->takes) notes->missed += static_cast<std::size_t>(count);
    Py_RETURN_NONE;
}

PyObject* notes_add_pass(PyObject* self, PyObject* const* arguments, Py_ssize_t given) {
    if (given != 4) return PyErr_Format(PyExc_TypeError, "expected 4 arguments, got %zd", given);
    std::int64_t numbers[3];  // the first parameter, the beginning, and what all came after
    if (!read_numbers(arguments, 3, numbers)) return unread(self);
    PyObject* ready = arguments[3];
    const Py_ssize_t count = PyList_Size(ready);
    if (count < 0) return nullptr;
    Notes* notes = notes_of(self);
    if (!notes->takes || count == 0) Py_RETURN_NONE;
    if (notes->pass_count >= notes->most_passes) {
        ++notes->missed;
        Py_RETURN_NONE;
    }
    try {
        std::vector<std::int64_t> after_ns(static_cast<std::size_t>(count));
        for (std::size_t place = 0; place < after_ns.size(); ++place) {
            PyObject* each = PyList_GetItem(ready, static_cast<Py_ssize_t>(place));
            after_ns[place] = PyLong_AsLongLong(each);
            if (after_ns[place] == -1 && PyErr_Occurred()) return unread(self);
        }
        const std::int64_t earliest_ns = *std::min_element(after_ns.begin(), after_ns.end());
        std::string packed;
        put(packed, std::max(numbers[1], numbers[2] - earliest_ns));
        put(packed, static_cast<std::uint32_t>(numbers[0]));
        put(packed, static_cast<std::uint32_t>(count));
        put_column(packed, after_ns.size(), [&](std::size_t place) {
            return place ? after_ns[place] - after_ns[place - 1] : after_ns[0];
        });
        notes->passes += packed;
        ++notes->pass_count;
    } catch (const std::bad_alloc&) {  // the job goes on
        ++notes->missed;
    }
    Py_RETURN_NONE;
}

std::string packed(const std::vector<Row>& rows) {
    std::string content;
    if (rows.empty()) return content;
    for (const Row& row : rows) content += static_cast<char>(row.kind);
    put(content, rows[0].time_ns);
    put_column(content, rows.size(), [&](std::size_t place) { return rows[place].number; });
    put_column(content, rows.size() - 1, [&](std::size_t place) {
        return rows[place + 1].time_ns - rows[place].time_ns;
    });
    put_column(content, rows.size(), [&](std::size_t place) { return rows[place].rest; });
    return content;
}

// Takes the notes out first. Where Python collects garbage while it makes the answer, a finalizer of
// the job may add more.
PyObject* notes_take(PyObject* self, PyObject*) {
    Notes* notes = notes_of(self);
    std::vector<Row> rows;
    std::string passes;
    rows.swap(notes->rows);
    passes.swap(notes->passes);
    const std::size_t taken_count = rows.size() + std::exchange(notes->pass_count, 0);
    const std::size_t missed = std::exchange(notes->missed, 0);
    PyObject* taken = nullptr;
    try {
        const std::string content = packed(rows);
        taken = Py_BuildValue("ny#y#n", static_cast<Py_ssize_t>(rows.size()), content.data(),
                              static_cast<Py_ssize_t>(content.size()), passes.data(),
                              static_cast<Py_ssize_t>(passes.size()),
                              static_cast<Py_ssize_t>(missed));
    } catch (const std::bad_alloc&) {
        PyErr_NoMemory();
    }
    if (taken == nullptr) notes->missed += missed + taken_count;
    if (notes->rows.empty()) {  // the next ones fill the same memory
        rows.clear();
        rows.swap(notes->rows);
    }
    return taken;
}

void forget(Notes* notes, bool takes) {
    notes->rows.clear();
    notes->passes.clear();
    notes->pass_count = notes->missed = 0;
    notes->takes = takes;
}

PyObject* notes_open(PyObject* self, PyObject*) {
    forget(notes_of(self), true);
    notes_of(self)->spent_ns = 0;
    Py_RETURN_NONE;
}

PyObject* notes_close(PyObject* self, PyObject*) {
    forget(notes_of(self), false);
    Py_RETURN_NONE;
}

PyObject* notes_starts_work(PyObject* self, PyObject*) {
    return PyLong_FromLongLong(now_ns(CLOCK_THREAD_CPUTIME_ID) - notes_of(self)->spent_ns);
}

PyObject* notes_ends_work(PyObject* self, PyObject* started) {
    const std::int64_t started_ns = PyLong_AsLongLong(started);
    if (started_ns == -1 && PyErr_Occurred()) return nullptr;
    notes_of(self)->spent_ns = now_ns(CLOCK_THREAD_CPUTIME_ID) - started_ns;
    Py_RETURN_NONE;
}

PyObject* notes_rows(PyObject* self, PyObject*) {
    const std::vector<Row>& rows = notes_of(self)->rows;
    PyObject* list = PyList_New(0);
    if (list == nullptr) return nullptr;
    for (std::size_t place = 0; place < rows.size(); ++place) {  // which may grow in between
        const Row row = rows[place];
        const Owned each(Py_BuildValue("LLLL", static_cast<long long>(row.kind),
                                       static_cast<long long>(row.number),
                                       static_cast<long long>(row.time_ns),
                                       static_cast<long long>(row.rest)));
        if (!each || PyList_Append(list, each.get()) < 0) {
            Py_DECREF(list);
            return nullptr;
        }
    }
    return list;
}

PyObject* notes_spent(PyObject* self, void*) {
    return PyLong_FromLongLong(notes_of(self)->spent_ns);
}

PyObject* notes_waiting(PyObject* self, void*) {
    return PyLong_FromSize_t(notes_of(self)->rows.size());
}

PyObject* notes_passes(PyObject* self, void*) {
    return PyLong_FromSize_t(notes_of(self)->pass_count);
}

PyObject* notes_takes(PyObject* self, void*) { return PyBool_FromLong(notes_of(self)->takes); }

PyObject* notes_new(PyTypeObject* type, PyObject* arguments, PyObject*) {
    Py_ssize_t most = 0, most_passes = 0;
    if (!PyArg_ParseTuple(arguments, "nn", &most, &most_passes)) return nullptr;
    const auto allocate = reinterpret_cast<allocfunc>(PyType_GetSlot(type, Py_tp_alloc));
    PyObject* self = allocate(type, 0);
    if (self == nullptr) return nullptr;
    Notes* notes = notes_of(self);
    new (&notes->rows) std::vector<Row>();
    new (&notes->passes) std::string();
    notes->most = static_cast<std::size_t>(std::max<Py_ssize_t>(most, 0));
    notes->most_passes = static_cast<std::size_t>(std::max<Py_ssize_t>(most_passes, 0));
    forget(notes, true);
    notes->spent_ns = 0;
    return self;
}

void notes_dealloc(PyObject* self) {
    using Rows = std::vector<Row>;
    using Text = std::string;
    notes_of(self)->rows.~Rows();
    notes_of(self)->passes.~Text();
    release(self);
}

PyMethodDef notes_methods[] = {
    {"add", fast(notes_add), METH_FASTCALL, nullptr},
    {"add_interval", fast(notes_add_interval), METH_FASTCALL, nullptr},
    {"add_now", fast(notes_add_now), METH_FASTCALL, nullptr},
    {"add_all", notes_add_all, METH_O, nullptr},
    {"add_pass", fast(notes_add_pass), METH_FASTCALL, nullptr},
    {"take", notes_take, METH_NOARGS, nullptr},
    {"open", notes_open, METH_NOARGS, nullptr},
    {"close", notes_close, METH_NOARGS, nullptr},
    {"starts_work", notes_starts_work, METH_NOARGS, nullptr},
    {"ends_work", notes_ends_work, METH_O, nullptr},
    {"rows", notes_rows, METH_NOARGS, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

PyGetSetDef notes_members[] = {
    {"spent_ns", notes_spent, nullptr, nullptr, nullptr},
    {"waiting", notes_waiting, nullptr, nullptr, nullptr},
    {"passes", notes_passes, nullptr, nullptr, nullptr},
    {"takes", notes_takes, nullptr, nullptr, nullptr},
    {nullptr, nullptr, nullptr, nullptr, nullptr},
};

PyType_Slot notes_slots[] = {
    {Py_tp_new, reinterpret_cast<void*>(notes_new)},
    {Py_tp_dealloc, reinterpret_cast<void*>(notes_dealloc)},
    {Py_tp_methods, notes_methods},
    {Py_tp_getset, notes_members},
    {0, nullptr},
};

PyType_Spec notes_spec = {"fullwire._hooks.Notes", sizeof(Notes), 0, Py_TPFLAGS_DEFAULT,
                          notes_slots};

}  // namespace

bool is_notes(PyObject* object) {
    return PyType_GetSlot(Py_TYPE(object), Py_tp_dealloc) == reinterpret_cast<void*>(notes_dealloc);
}

PyObject* notes_type() { return PyType_FromSpec(&notes_spec); }

}  // namespace fullwire
