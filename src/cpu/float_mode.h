// How a thread computes with floats: how it rounds, and whether subnormal numbers count as zero.
#pragma once

#include <cstdint>

namespace octavo::cpu {

// Sets this thread's mode to the one that programs start with, until the object goes: results round to
// nearest, and subnormal numbers are not taken for zeros. Other libraries set another one, XLA while it calls
// an operator, and a new thread has that of the thread that starts it. Without this, bits would depend on the
// caller and, within one call, on the thread that an element falls to. A mode that is the default already is
// not written: that would cost more than reading it.
class DefaultFloatMode {
  public:
    DefaultFloatMode() : found_(read()) {
        if (is_other()) write(kDefault);
    }
    ~DefaultFloatMode() {
        if (is_other()) write(found_);
    }
    DefaultFloatMode(const DefaultFloatMode&) = delete;
    DefaultFloatMode& operator=(const DefaultFloatMode&) = delete;

  private:
#if defined(__x86_64__)
    using Word = uint32_t;                     // MXCSR
    static constexpr Word kDefault = 0x1f80;   // all exceptions are masked
    static constexpr Word kExceptions = 0x3f;  // those that have occurred, which are no part of the mode
    static Word read() { return __builtin_ia32_stmxcsr(); }
    static void write(Word word) { __builtin_ia32_ldmxcsr(word); }
#elif defined(__aarch64__)
    using Word = uint64_t;  // FPCR
    static constexpr Word kDefault = 0, kExceptions = 0;
    static Word read() {
        Word word;
        asm volatile("mrs %0, fpcr" : "=r"(word));
        return word;
    }
    static void write(Word word) { asm volatile("msr fpcr, %0" : : "r"(word) : "memory"); }
#else  // the mode stays as it is
    using Word = uint32_t;
    static constexpr Word kDefault = 0, kExceptions = 0;
    static Word read() { return kDefault; }
    static void write(Word) {}
#endif

    bool is_other() const { return (found_ & ~kExceptions) != kDefault; }

    const Word found_;
};

}  // namespace octavo::cpu
