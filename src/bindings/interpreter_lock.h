// The interpreter lock, in threads that the interpreter does not wait for when it exits.
#pragma once

#include <nanobind/nanobind.h>

#include <unistd.h>

namespace octavo::bindings {

namespace nb = nanobind;

// Stands around a call into Python that may have to wait for the interpreter lock.
//
// While the interpreter exits, CPython up to 3.13 ends a daemon thread that wants the lock by pthread_exit(),
// which glibc carries out by unwinding the thread's stack. Our frames must not be unwound: their destructors
// would drop references to Python's objects without the lock, and nanobind's frames are noexcept, where the
// process aborts. So such a thread sleeps here until the process ends, as CPython lets it do from 3.14 on.
class SleepIfUnwound {
  public:
    SleepIfUnwound() = default;
    SleepIfUnwound(const SleepIfUnwound&) = delete;
    ~SleepIfUnwound() noexcept(false) {
        while (!returned_) pause();
    }
    void returned() { returned_ = true; }

  private:
    bool returned_ = false;
};

// Calls a function of Python's C interface (none throws a C++ exception) that may run Python code, which may
// pass the lock on.
template <class Function, class... Args>
auto call_python(Function function, Args... args) {
    SleepIfUnwound scope;
    auto result = function(args...);
    scope.returned();
    return result;
}

// Calls what may be Python code of the caller's.
inline nb::object call_object(nb::handle function, const nb::tuple& args, const nb::dict& options = {}) {
    nb::object result = nb::steal(call_python(PyObject_Call, function.ptr(), args.ptr(), options.ptr()));
    if (!result.is_valid()) throw nb::python_error();
    return result;
}

// Gives the lock up for its own scope.
class InterpreterUnlocked {
  public:
    InterpreterUnlocked() : state_(PyEval_SaveThread()) {}
    InterpreterUnlocked(const InterpreterUnlocked&) = delete;
    ~InterpreterUnlocked() noexcept(false) {
        SleepIfUnwound scope;
        PyEval_RestoreThread(state_);
        scope.returned();
    }

  private:
    PyThreadState* state_;
};

}  // namespace octavo::bindings
