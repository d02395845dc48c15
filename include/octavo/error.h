// What octavo throws. Every message names the operator, the argument, the requirement and the value:
// "paged_attention: num_q_heads (3) must be a multiple of num_kv_heads (2)".
#pragma once

#include <cstdint>
#include <new>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace octavo {

class Error : public std::runtime_error {
  public:
    using std::runtime_error::runtime_error;
};

// A shape or a value that the operator cannot take. Python: ValueError.
class ValueError : public Error {
  public:
    using Error::Error;
};

// A kind of object or a dtype that the operator cannot take. Python: TypeError.
class TypeError : public Error {
  public:
    using Error::Error;
};

// Arrays on different devices, no usable driver, a failed CUDA call. Python: RuntimeError.
class DeviceError : public Error {
  public:
    using Error::Error;
};

// The allocator has too few free pages; its state is as before the call. Python: octavo.OutOfPages.
class OutOfPages : public Error {
  public:
    explicit OutOfPages(const std::string& message, std::vector<int64_t> unfit = {})
        : Error(message), indices(std::move(unfit)) {}

    std::vector<int64_t> indices;  // the sequences that did not fit, in a call that takes several
};

// The system has too little memory for what the message says. Python: MemoryError.
class OutOfMemory : public std::bad_alloc {
  public:
    explicit OutOfMemory(const std::string& message) : message_(message) {}
    const char* what() const noexcept override { return message_.what(); }

  private:
    std::runtime_error message_;  // which is copied without an exception
};

// A handle that was freed, or that this allocator never gave out. Python: octavo.InvalidSequence.
class InvalidSequence : public Error {
  public:
    using Error::Error;
};

}  // namespace octavo
