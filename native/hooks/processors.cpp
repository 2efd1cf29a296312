// Processor time and run delay of the program's thread: of recorder/inside/processors.py, the short
// way of `note_delay`, and `BeforeForward`.

#include "hooks.hpp"

#include <sys/resource.h>
#include <unistd.h>

namespace fullwire {
namespace {

constexpr std::int64_t WORTH_A_NOTE_NS = 1'000'000;

// The running and waiting time of the thread that steps, from a file that Python keeps open.
struct ShortDelay {
    PyObject_HEAD
    PyObject* notes;
    int file;  // -1: none
    unsigned long thread;
    std::int64_t noted_ns, run_ns, delay_ns;
};

ShortDelay* short_delay_of(PyObject* self) { return reinterpret_cast<ShortDelay*>(self); }

// Reads a whole number and the character after it.
bool read_number(const char*& text, char after, std::int64_t& number) {
    const char* const begin = text;
    number = 0;
    while (*text >= '0' && *text <= '9' && text - begin < 18) {
        number = number * 10 + (*text++ - '0');
    }
    return text > begin && *text++ == after;
}

// Reads the times of a thread; false where the file holds anything else.
bool read_times(int file, std::int64_t& run_ns, std::int64_t& delay_ns) {
    char content[101];
    const ssize_t length = pread(file, content, sizeof content - 1, 0);
    if (length <= 0) return false;
    content[length] = '\0';
    const char* text = content;
    std::int64_t turns = 0;
    return read_number(text, ' ', run_ns) && read_number(text, ' ', delay_ns) &&
           read_number(text, '\n', turns);
}

// Notes the times since the last; False where this is another thread, or there is no such file.
PyObject* short_delay_note(PyObject* self, PyObject*) {
    ShortDelay* kept = short_delay_of(self);
    Notes* notes = notes_of(kept->notes);
    if (kept->file < 0 || kept->thread != PyThread_get_thread_ident()) Py_RETURN_FALSE;
    const std::int64_t at_ns = now_ns(CLOCK_MONOTONIC);
    if (at_ns - kept->noted_ns < WORTH_A_NOTE_NS || !notes->takes) Py_RETURN_TRUE;
    std::int64_t run_ns = 0, delay_ns = 0;
    if (!read_times(kept->file, run_ns, delay_ns)) Py_RETURN_FALSE;
    notes->add(DELAY, delay_ns - kept->delay_ns, at_ns, run_ns - kept->run_ns);
    kept->noted_ns = at_ns;
    kept->run_ns = run_ns;
    kept->delay_ns = delay_ns;
    Py_RETURN_TRUE;
}

PyObject* short_delay_use(PyObject* self, PyObject* const* arguments, Py_ssize_t given) {
    std::int64_t numbers[3];
    if (!read_numbers(arguments, given, numbers)) return nullptr;
    ShortDelay* kept = short_delay_of(self);
    kept->file = static_cast<int>(numbers[0]);
    kept->run_ns = numbers[1];
    kept->delay_ns = numbers[2];
    kept->thread = PyThread_get_thread_ident();
    kept->noted_ns = now_ns(CLOCK_MONOTONIC);
    Py_RETURN_NONE;
}

PyObject* short_delay_stop(PyObject* self, PyObject*) {
    ShortDelay* kept = short_delay_of(self);
    if (kept->file < 0) Py_RETURN_NONE;
    kept->file = -1;
    return Py_BuildValue("LL", static_cast<long long>(kept->run_ns),
                         static_cast<long long>(kept->delay_ns));
}

PyObject* short_delay_new(PyTypeObject* type, PyObject* arguments, PyObject*) {
    PyObject* notes = nullptr;
    if (!PyArg_ParseTuple(arguments, "O", &notes)) return nullptr;
    ShortDelay* kept = made<ShortDelay>(type);
    if (kept == nullptr) return nullptr;
    kept->file = -1;
    kept->notes = checked_notes(notes);
    return made_whole(kept, kept->notes != nullptr);
}

void short_delay_dealloc(PyObject* self) {
    Py_XDECREF(short_delay_of(self)->notes);
    release(self);
}

PyMethodDef short_delay_methods[] = {
    {"note", short_delay_note, METH_NOARGS, nullptr},
    {"use", fast(short_delay_use), METH_FASTCALL, nullptr},
    {"stop", short_delay_stop, METH_NOARGS, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

PyType_Slot short_delay_slots[] = {
    {Py_tp_new, reinterpret_cast<void*>(short_delay_new)},
    {Py_tp_dealloc, reinterpret_cast<void*>(short_delay_dealloc)},
    {Py_tp_methods, short_delay_methods},
    {0, nullptr},
};

PyType_Spec short_delay_spec = {"fullwire._hooks.ShortDelay", sizeof(ShortDelay), 0,
                                Py_TPFLAGS_DEFAULT, short_delay_slots};

struct BeforeForward {
    PyObject_HEAD
    PyObject* notes;
};

// What a thread has used, from a step or a batch on.
struct Since {
    PyObject* owner;  // or nullptr
    std::int64_t began_ns, used_ns, blocks;
};

thread_local Since since;

Since so_far(PyObject* owner) {
    rusage usage{};
    getrusage(RUSAGE_THREAD, &usage);
    return {owner, now_ns(CLOCK_MONOTONIC), now_ns(CLOCK_THREAD_CPUTIME_ID), usage.ru_inblock};
}

PyObject* before_forward_begins(PyObject* self, PyObject*) {
    since = so_far(self);
    Py_RETURN_NONE;
}

PyObject* before_forward_ends(PyObject* self, PyObject*) {
    const Since began = since;
    since.owner = nullptr;
    if (began.owner != self || now_ns(CLOCK_MONOTONIC) - began.began_ns < WORTH_A_NOTE_NS) {
        Py_RETURN_NONE;
    }
    const Since now = so_far(self);
    Notes* notes = notes_of(reinterpret_cast<BeforeForward*>(self)->notes);
    notes->add(BEFORE_FORWARD, now.used_ns - began.used_ns, now.began_ns,
               now.blocks - began.blocks);
    Py_RETURN_NONE;
}

PyObject* before_forward_new(PyTypeObject* type, PyObject* arguments, PyObject*) {
    PyObject* notes = nullptr;
    if (!PyArg_ParseTuple(arguments, "O", &notes)) return nullptr;
    BeforeForward* kept = made<BeforeForward>(type);
    if (kept == nullptr) return nullptr;
    kept->notes = checked_notes(notes);
    return made_whole(kept, kept->notes != nullptr);
}

void before_forward_dealloc(PyObject* self) {
    Py_XDECREF(reinterpret_cast<BeforeForward*>(self)->notes);
    release(self);
}

PyMethodDef before_forward_methods[] = {
    {"begins", before_forward_begins, METH_NOARGS, nullptr},
    {"ends", before_forward_ends, METH_NOARGS, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

PyType_Slot before_forward_slots[] = {
    {Py_tp_new, reinterpret_cast<void*>(before_forward_new)},
    {Py_tp_dealloc, reinterpret_cast<void*>(before_forward_dealloc)},
    {Py_tp_methods, before_forward_methods},
    {0, nullptr},
};

PyType_Spec before_forward_spec = {"fullwire._hooks.BeforeForward", sizeof(BeforeForward), 0,
                                   Py_TPFLAGS_DEFAULT, before_forward_slots};

}  // namespace

PyObject* short_delay_type() { return PyType_FromSpec(&short_delay_spec); }

PyObject* before_forward_type() { return PyType_FromSpec(&before_forward_spec); }

}  // namespace fullwire
