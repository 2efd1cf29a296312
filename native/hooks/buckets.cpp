// The short way of DDP's buckets: `Buckets` of recorder/inside/buckets.py.

#include "hooks.hpp"

#include <deque>
#include <limits>

namespace fullwire {
namespace {

constexpr std::size_t MOST_UNSETTLED = 64;
constexpr Py_ssize_t MOST_KNOWN = 4096;
constexpr std::int64_t NEVER_NS = std::numeric_limits<std::int64_t>::max();

// A bucket that has ended, well or badly; it holds a reference to its future.
struct Unsettled {
    std::int64_t number, issued_ns;
    unsigned long thread;
    std::int64_t ended_ns;
    PyObject* future;
};

enum Name { IS_IN_USE, IS_ON, IS_TIMED, IS_TIMING, IS_CUDA, TRUE_GROUP, NAME, GET_FUTURE, VALUE,
            GIVE_UP, NAMES };
constexpr const char* SPELLED[NAMES] = {"is_in_use", "is_on", "is_timed", "is_timing", "is_cuda",
                                        "true", "name", "get_future", "value", "give_up"};
enum Given { JOURNAL, CODEC, PROBES, ORIGINAL, PLAIN, OTHERWISE, DESCRIBE, OTHER, NUMBERS, GIVEN };

PyObject* names[NAMES];
PyTypeObject *allreduce_type, *ended_type;
PyObject* when_done;  // torch's own

struct Buckets {
    PyObject_HEAD
    PyObject* given[GIVEN];
    PyObject* notes;
    PyObject* known;  // by the identity of a tensor: the Bucket of buckets.py
    PyObject* token;  // each callback holds a reference, so their count tells how many are left
    std::deque<Unsettled> unsettled;
    bool knows_devices;
};

// The all-reduce of one group, as Python binds a method to its object.
struct Allreduce {
    PyObject_HEAD
    PyObject* buckets;
    PyObject* group;
};

// What a future calls at its end.
struct Ended {
    PyObject_HEAD
    PyObject *buckets, *token;
    std::int64_t number, issued_ns;
    unsigned long thread;
};

Buckets* buckets_of(PyObject* self) { return reinterpret_cast<Buckets*>(self); }

// Says whether an attribute is true; -1 after an error.
int is_true(PyObject* object, Name name) {
    const Owned value(PyObject_GetAttr(object, names[name]));
    return value ? PyObject_IsTrue(value.get()) : -1;
}

// Says whether a sum takes the short way; -1 after an error.
int is_short(const Buckets* buckets, PyObject* tensors) {
    if (!notes_of(buckets->notes)->takes || !PyList_Check(tensors) || PyList_Size(tensors) != 1) {
        return 0;
    }
    int is_other = is_true(buckets->given[CODEC], IS_IN_USE);
    PyObject* probes = buckets->given[PROBES];
    if (is_other == 0 && probes != Py_None) is_other = is_true(probes, IS_ON);
    if (is_other == 0 && probes != Py_None) {
        is_other = is_true(probes, IS_TIMED);
        if (is_other == 1) {
            const Owned is_timing(PyObject_CallMethodObjArgs(probes, names[IS_TIMING], nullptr));
            is_other = is_timing ? PyObject_IsTrue(is_timing.get()) : -1;
        }
    }
    if (is_other == 0 && buckets->knows_devices) {
        is_other = is_true(PyList_GetItem(tensors, 0), IS_CUDA);
    }
    return is_other < 0 ? -1 : !is_other;
}

// Ends the recording for the error that is set: the job goes on. An interruption of that stays set.
void give_up(const Buckets* buckets) {
    PyObject *type = nullptr, *value = nullptr, *trace = nullptr;
    PyErr_Fetch(&type, &value, &trace);
    PyErr_NormalizeException(&type, &value, &trace);
    const Owned told(
        PyObject_CallMethodObjArgs(buckets->given[JOURNAL], names[GIVE_UP], value, nullptr));
    Py_XDECREF(type);
    Py_XDECREF(value);
    Py_XDECREF(trace);
    if (!told && PyErr_ExceptionMatches(PyExc_Exception)) PyErr_Clear();
}

// Says whether a future has a result; an error that would end the job stays set.
bool is_well(PyObject* future) {
    const Owned value(PyObject_CallMethodObjArgs(future, names[VALUE], nullptr));
    if (!value && PyErr_ExceptionMatches(PyExc_Exception)) PyErr_Clear();
    return static_cast<bool>(value);
}

void settle(Buckets* buckets, std::int64_t well_since_ns) {
    Notes* notes = notes_of(buckets->notes);
    const unsigned long here = PyThread_get_thread_ident();
    const std::int64_t started_ns = now_ns(CLOCK_THREAD_CPUTIME_ID) - notes->spent_ns;
    while (!buckets->unsettled.empty() && !PyErr_Occurred()) {
        const Unsettled each = buckets->unsettled.front();  // others may run while it is asked
        buckets->unsettled.pop_front();
        const bool is_known = each.issued_ns >= well_since_ns && each.thread == here;
        if (is_known || is_well(each.future)) notes->add(END, each.number, each.ended_ns, 0);
        Py_DECREF(each.future);
    }
    notes->spent_ns = now_ns(CLOCK_THREAD_CPUTIME_ID) - started_ns;
}

// Returns the Bucket of a tensor, which is asked for its size once in its life; a new reference.
PyObject* bucket_of(Buckets* buckets, PyObject* tensor, PyObject* name) {
    const Owned key(PyLong_FromVoidPtr(tensor));
    if (!key) return nullptr;
    PyObject* found = PyDict_GetItemWithError(buckets->known, key.get());
    if (found == nullptr && PyErr_Occurred()) return nullptr;
    if (found != nullptr) {
        const bool is_alive = PyWeakref_GetObject(PyTuple_GetItem(found, 0)) == tensor;
        PyObject* group = PyTuple_GetItem(found, 1);
        const int is_same = group == name ? 1 : PyObject_RichCompareBool(group, name, Py_EQ);
        if (is_same < 0) return nullptr;
        if (is_alive && is_same) return Py_NewRef(found);
    }
    if (PyDict_Size(buckets->known) >= MOST_KNOWN) PyDict_Clear(buckets->known);
    PyObject* made_now =
        PyObject_CallFunctionObjArgs(buckets->given[DESCRIBE], tensor, name, nullptr);
    if (made_now != nullptr && PyDict_SetItem(buckets->known, key.get(), made_now) < 0) {
        Py_DECREF(made_now);
        return nullptr;
    }
    return made_now;
}

// Adds one to the count of collectives that others keep in a list.
bool count_one(PyObject* bucket) {
    PyObject* seen = PyTuple_GetItem(bucket, 3);
    const long long count = PyLong_AsLongLong(PyList_GetItem(seen, 0));
    if (count == -1 && PyErr_Occurred()) return false;
    PyObject* next = PyLong_FromLongLong(count + 1);
    return next != nullptr && PyList_SetItem(seen, 0, next) == 0;  // which takes the reference
}

// Notes the issue of a bucket, and arranges the note of its end; false after an error.
bool note_issue(PyObject* self, PyObject* group, PyObject* tensor, std::int64_t issued_ns,
                PyObject* work) {
    Buckets* buckets = buckets_of(self);
    const Owned name(PyObject_GetAttr(group, names[NAME]));
    const Owned number(name ? PyIter_Next(buckets->given[NUMBERS]) : nullptr);
    const Owned bucket(number ? bucket_of(buckets, tensor, name.get()) : nullptr);
    if (!bucket || !count_one(bucket.get())) return false;
    const std::int64_t counted = PyLong_AsLongLong(number.get());
    const std::int64_t signature = PyLong_AsLongLong(PyTuple_GetItem(bucket.get(), 2));
    if (PyErr_Occurred()) return false;
    notes_of(buckets->notes)->add(ISSUE, counted, issued_ns, signature);
    if (buckets->unsettled.size() >= MOST_UNSETTLED) settle(buckets, NEVER_NS);
    if (PyErr_Occurred()) return false;
    const Owned future(PyObject_CallMethodObjArgs(work, names[GET_FUTURE], nullptr));
    if (!future) return false;
    Ended* ended = made<Ended>(ended_type);
    if (ended == nullptr) return false;
    ended->buckets = Py_NewRef(self);
    ended->token = Py_NewRef(buckets->token);
    ended->number = counted;
    ended->issued_ns = issued_ns;
    ended->thread = PyThread_get_thread_ident();
    const Owned callback(reinterpret_cast<PyObject*>(ended));
    const Owned told(
        PyObject_CallFunctionObjArgs(when_done, future.get(), callback.get(), nullptr));
    return static_cast<bool>(told);
}

PyObject* after_first(PyObject* first, PyObject* arguments) {
    const Py_ssize_t count = PyTuple_Size(arguments);
    PyObject* all = PyTuple_New(count + 1);
    if (all == nullptr) return nullptr;
    PyTuple_SetItem(all, 0, Py_NewRef(first));
    for (Py_ssize_t place = 0; place < count; ++place) {
        PyTuple_SetItem(all, place + 1, Py_NewRef(PyTuple_GetItem(arguments, place)));
    }
    return all;
}

// Sends a bucket of a group, whose arguments are the tensors and their options.
PyObject* send(PyObject* self, PyObject* group, PyObject* arguments, PyObject* keywords) {
    Buckets* buckets = buckets_of(self);
    PyObject* tensors = PyTuple_Size(arguments) > 0 ? PyTuple_GetItem(arguments, 0) : nullptr;
    int quick = tensors != nullptr && keywords == nullptr ? is_short(buckets, tensors) : 0;
    if (quick < 0 && PyErr_ExceptionMatches(PyExc_Exception)) {
        give_up(buckets);
        quick = 0;
    }
    if (PyErr_Occurred()) return nullptr;
    if (!quick) {
        const Owned all(after_first(group, arguments));
        return all ? PyObject_Call(buckets->given[OTHERWISE], all.get(), keywords) : nullptr;
    }
    const Owned hidden(PyObject_GetAttr(group, names[TRUE_GROUP]));
    const Owned all(hidden ? after_first(hidden.get(), arguments) : nullptr);
    if (!all) return nullptr;
    const std::int64_t issued_ns = now_ns(CLOCK_MONOTONIC);
    PyObject* work = PyObject_Call(buckets->given[ORIGINAL], all.get(), nullptr);
    if (work == nullptr) return nullptr;
    Notes* notes = notes_of(buckets->notes);
    const std::int64_t started_ns = now_ns(CLOCK_THREAD_CPUTIME_ID) - notes->spent_ns;
    bool is_noted;
    if (reinterpret_cast<PyObject*>(Py_TYPE(work)) == buckets->given[PLAIN]) {
        is_noted = note_issue(self, group, PyList_GetItem(tensors, 0), issued_ns, work);
    } else {  // a transport's own, which may tell more
        const Owned issued(PyLong_FromLongLong(issued_ns));
        const Owned told(PyObject_CallFunctionObjArgs(buckets->given[OTHER], hidden.get(), tensors,
                                                      issued.get(), work, nullptr));
        is_noted = static_cast<bool>(told);
    }
    if (!is_noted && PyErr_ExceptionMatches(PyExc_Exception)) give_up(buckets);
    notes->spent_ns = now_ns(CLOCK_THREAD_CPUTIME_ID) - started_ns;
    if (PyErr_Occurred()) Py_CLEAR(work);  // an interruption, which is the job's
    return work;
}

PyObject* buckets_call(PyObject* self, PyObject* arguments, PyObject* keywords) {
    if (PyTuple_Size(arguments) < 1) {
        PyErr_SetString(PyExc_TypeError, "expected a group");
        return nullptr;
    }
    const Owned others(PyTuple_GetSlice(arguments, 1, PyTuple_Size(arguments)));
    return others ? send(self, PyTuple_GetItem(arguments, 0), others.get(), keywords) : nullptr;
}

PyObject* buckets_bind(PyObject* self, PyObject* group, PyObject*) {
    if (group == nullptr || group == Py_None) return Py_NewRef(self);
    Allreduce* bound = made<Allreduce>(allreduce_type);
    if (bound == nullptr) return nullptr;
    bound->buckets = Py_NewRef(self);
    bound->group = Py_NewRef(group);
    return reinterpret_cast<PyObject*>(bound);
}

PyObject* allreduce_call(PyObject* self, PyObject* arguments, PyObject* keywords) {
    const auto* bound = reinterpret_cast<Allreduce*>(self);
    return send(bound->buckets, bound->group, arguments, keywords);
}

void remember(PyObject* self, std::int64_t number, std::int64_t issued_ns, unsigned long thread,
              PyObject* future) {
    try {
        buckets_of(self)->unsettled.push_back(
            {number, issued_ns, thread, now_ns(CLOCK_MONOTONIC), future});
        Py_INCREF(future);
    } catch (const std::bad_alloc&) {  // its end stays unknown; the job goes on
    }
}

PyObject* ended_call(PyObject* self, PyObject* arguments, PyObject*) {
    const auto* ended = reinterpret_cast<Ended*>(self);
    PyObject* future = PyTuple_GetItem(arguments, 0);
    if (future == nullptr) return nullptr;
    remember(ended->buckets, ended->number, ended->issued_ns, ended->thread, future);
    Py_RETURN_NONE;
}

PyObject* buckets_ended(PyObject* self, PyObject* const* arguments, Py_ssize_t given) {
    if (given != 4) return PyErr_Format(PyExc_TypeError, "expected 4 arguments, got %zd", given);
    const std::int64_t number = PyLong_AsLongLong(arguments[0]);
    const std::int64_t issued_ns = PyLong_AsLongLong(arguments[1]);
    const unsigned long thread = PyLong_AsUnsignedLong(arguments[2]);
    if (PyErr_Occurred()) return nullptr;
    remember(self, number, issued_ns, thread, arguments[3]);
    Py_RETURN_NONE;
}

PyObject* buckets_settle(PyObject* self, PyObject* well_since) {
    const std::int64_t since_ns = PyLong_AsLongLong(well_since);
    if (since_ns == -1 && PyErr_Occurred()) return nullptr;
    if (!buckets_of(self)->unsettled.empty()) settle(buckets_of(self), since_ns);
    return PyErr_Occurred() ? nullptr : Py_BuildValue("");
}

PyObject* buckets_forget(PyObject* self, PyObject*) {
    Buckets* buckets = buckets_of(self);
    PyDict_Clear(buckets->known);
    while (!buckets->unsettled.empty()) {  // others may run while a future is given back
        PyObject* future = buckets->unsettled.front().future;
        buckets->unsettled.pop_front();
        Py_DECREF(future);
    }
    Py_RETURN_NONE;
}

PyObject* buckets_allreduce(PyObject* self, void*) { return Py_NewRef(self); }

PyObject* buckets_known(PyObject* self, void*) { return Py_NewRef(buckets_of(self)->known); }

PyObject* buckets_token(PyObject* self, void*) { return Py_NewRef(buckets_of(self)->token); }

PyObject* buckets_new(PyTypeObject* type, PyObject* arguments, PyObject*) {
    PyObject* given[GIVEN];
    int knows_devices = 0;
    if (!PyArg_ParseTuple(arguments, "OOOOOOOOOp", &given[JOURNAL], &given[CODEC], &given[PROBES],
                          &given[ORIGINAL], &given[PLAIN], &given[OTHERWISE], &given[DESCRIBE],
                          &given[OTHER], &given[NUMBERS], &knows_devices)) {
        return nullptr;
    }
    Buckets* buckets = made<Buckets>(type);
    if (buckets == nullptr) return nullptr;
    try {
        new (&buckets->unsettled) std::deque<Unsettled>();
    } catch (const std::bad_alloc&) {
        release(reinterpret_cast<PyObject*>(buckets));
        return PyErr_NoMemory();
    }
    for (int place = 0; place < GIVEN; ++place) buckets->given[place] = Py_NewRef(given[place]);
    buckets->knows_devices = knows_devices != 0;
    buckets->known = PyDict_New();
    buckets->token = PyList_New(0);
    const Owned notes(PyObject_GetAttrString(given[JOURNAL], "notes"));
    buckets->notes = checked_notes(notes.get());
    return made_whole(buckets, buckets->known && buckets->token && buckets->notes);
}

void buckets_dealloc(PyObject* self) {
    using Queue = std::deque<Unsettled>;
    Buckets* buckets = buckets_of(self);
    for (const Unsettled& each : buckets->unsettled) Py_DECREF(each.future);
    buckets->unsettled.~Queue();
    for (PyObject* each : buckets->given) Py_XDECREF(each);
    Py_XDECREF(buckets->known);
    Py_XDECREF(buckets->token);
    Py_XDECREF(buckets->notes);
    release(self);
}

void allreduce_dealloc(PyObject* self) {
    Py_XDECREF(reinterpret_cast<Allreduce*>(self)->buckets);
    Py_XDECREF(reinterpret_cast<Allreduce*>(self)->group);
    release(self);
}

void ended_dealloc(PyObject* self) {
    Py_XDECREF(reinterpret_cast<Ended*>(self)->buckets);
    Py_XDECREF(reinterpret_cast<Ended*>(self)->token);
    release(self);
}

PyMethodDef buckets_methods[] = {
    {"ended", fast(buckets_ended), METH_FASTCALL, nullptr},
    {"settle", buckets_settle, METH_O, nullptr},
    {"forget", buckets_forget, METH_NOARGS, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

PyGetSetDef buckets_members[] = {
    {"allreduce", buckets_allreduce, nullptr, nullptr, nullptr},
    {"known", buckets_known, nullptr, nullptr, nullptr},
    {"held_by_callbacks", buckets_token, nullptr, nullptr, nullptr},
    {nullptr, nullptr, nullptr, nullptr, nullptr},
};

PyType_Slot buckets_slots[] = {
    {Py_tp_new, reinterpret_cast<void*>(buckets_new)},
    {Py_tp_dealloc, reinterpret_cast<void*>(buckets_dealloc)},
    {Py_tp_call, reinterpret_cast<void*>(buckets_call)},
    {Py_tp_descr_get, reinterpret_cast<void*>(buckets_bind)},
    {Py_tp_methods, buckets_methods},
    {Py_tp_getset, buckets_members},
    {0, nullptr},
};

PyType_Slot allreduce_slots[] = {
    {Py_tp_dealloc, reinterpret_cast<void*>(allreduce_dealloc)},
    {Py_tp_call, reinterpret_cast<void*>(allreduce_call)},
    {0, nullptr},
};

PyType_Slot ended_slots[] = {
    {Py_tp_dealloc, reinterpret_cast<void*>(ended_dealloc)},
    {Py_tp_call, reinterpret_cast<void*>(ended_call)},
    {0, nullptr},
};

PyType_Spec buckets_spec = {"fullwire._hooks.Buckets", sizeof(Buckets), 0, Py_TPFLAGS_DEFAULT,
                            buckets_slots};
// Python cannot make these, which would be empty.
constexpr unsigned int MADE_HERE = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION;
PyType_Spec allreduce_spec = {"fullwire._hooks.Allreduce", sizeof(Allreduce), 0, MADE_HERE,
                              allreduce_slots};
PyType_Spec ended_spec = {"fullwire._hooks.Ended", sizeof(Ended), 0, MADE_HERE, ended_slots};

}  // namespace

PyObject* use_torch(PyObject*, PyObject* add_done_callback) {
    Py_XDECREF(when_done);
    when_done = Py_NewRef(add_done_callback);
    Py_RETURN_NONE;
}

PyObject* buckets_type() {
    for (int name = 0; name < NAMES; ++name) {
        names[name] = PyUnicode_InternFromString(SPELLED[name]);
        if (names[name] == nullptr) return nullptr;
    }
    allreduce_type = reinterpret_cast<PyTypeObject*>(PyType_FromSpec(&allreduce_spec));
    ended_type = reinterpret_cast<PyTypeObject*>(PyType_FromSpec(&ended_spec));
    return allreduce_type && ended_type ? PyType_FromSpec(&buckets_spec) : nullptr;
}

}  // namespace fullwire
