// The recorder's hottest hooks, for the job's own Python: what `recorder/inside/notes.py` and
// `buckets.py` do, in fewer instructions. A job fills the processor's caches between two hooks, so
// each function of Python that a hook calls costs some 3 us, and a function here a tenth of that.
//
// This is a module of its own, apart from `_native`, and needs CPython's stable ABI alone. So every
// CPython from 3.10 on can load it, also one that has no Fullwire. It never reads a tensor.

#include "hooks.hpp"

namespace {

PyMethodDef functions[] = {
    {"use_torch", fullwire::use_torch, METH_O, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

PyModuleDef definition = {PyModuleDef_HEAD_INIT, "fullwire._hooks", nullptr, -1, functions,
                          nullptr, nullptr, nullptr, nullptr};

}  // namespace

PyMODINIT_FUNC PyInit__hooks() {
    PyObject* module = PyModule_Create(&definition);
    const std::pair<const char*, PyObject* (*)()> types[] = {
        {"Notes", fullwire::notes_type},
        {"Buckets", fullwire::buckets_type},
        {"ShortDelay", fullwire::short_delay_type},
        {"BeforeForward", fullwire::before_forward_type},
    };
    for (const auto& [name, make] : types) {
        PyObject* type = module == nullptr ? nullptr : make();
        if (type == nullptr || PyModule_AddObject(module, name, type) < 0) return nullptr;
    }
    return module;
}
