// Makes TensorViews of the caller's arrays, without copies.
#pragma once

#include "bindings/array_type.h"
#include "bindings/interpreter_lock.h"
#include "operators/schema.h"

#include <octavo/tensor.h>

#include <nanobind/nanobind.h>

#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace octavo::bindings {

namespace nb = nanobind;

using schema::Accept;

// int64 is for arguments that say so. The checks refuse whatever else is of the wrong kind.
constexpr bool may_be(DType dtype, Accept accept) {
    return dtype != DType::int64 || accept == Accept::integer || accept == Accept::words;
}

// What an array whose dtype has this name is read as: words have no sign, and a bool of a mask is a byte.
// Returns nothing if Octavo has no such dtype.
std::optional<DType> dtype_named(std::string_view name, Accept accept);

// Refuses a dtype: "k must be float32, float16 or bfloat16; got int32".
[[noreturn]] void refuse_dtype(const char* op, std::string_view name, Accept accept, const std::string& got);
dlpack::DataType to_dlpack(DType dtype);
dlpack::Device to_dlpack(Device device);

// A tensor that an array lent. Given back when this goes, with the interpreter lock held.
class Loan {
  public:
    static bool is_capsule(nb::handle object);
    explicit Loan(nb::handle capsule);  // takes the tensor out of the capsule
    explicit Loan(dlpack::ManagedTensorVersioned* tensor) : versioned_(tensor) {}
    Loan(Loan&& other) noexcept;
    Loan(const Loan&) = delete;
    Loan& operator=(const Loan&) = delete;
    ~Loan();

    bool is_known_version() const {
        return !versioned_ || versioned_->version.major == dlpack::kMajorVersion;
    }
    bool is_read_only() const { return versioned_ && (versioned_->flags & dlpack::kReadOnly); }
    bool is_copy() const { return versioned_ && (versioned_->flags & dlpack::kCopied); }
    const dlpack::Tensor& tensor() const { return versioned_ ? versioned_->tensor : unversioned_->tensor; }

  private:
    dlpack::ManagedTensorVersioned* versioned_ = nullptr;
    dlpack::ManagedTensor* unversioned_ = nullptr;
};

// What the kernels that torch's dispatcher calls give as `stream`. The stream is the current one. Results
// come from torch's own allocator, so that its CUDA graphs can take their memory back; tensors made through
// DLPack's exchange table, which cost less, do not. Tensors that the dispatcher has to unwrap are refused.
nb::handle torch_dispatcher();

// One call of an operator: imports its arrays, keeps what they lent until the work is done (CPU) or launched
// (CUDA), and settles the stream. The first array imported decides framework, device and stream, but for
// those that may lie in host memory beside others on a GPU.
class Call {
  public:
    // `stream`: None for the first array's current one, what the caller wants instead, or torch_dispatcher().
    Call(const char* op, nb::handle stream);
    Call(const Call&) = delete;
    Call& operator=(const Call&) = delete;

    TensorView input(const char* name, nb::handle array, Accept accept = Accept::data);
    std::optional<TensorView> optional_input(const char* name, nb::handle array, Accept accept);
    // Imports an array that the operator writes.
    TensorView output(const char* name, nb::handle array, Accept accept = Accept::data);
    // These may be in host memory whatever the device is; there they do not decide it.
    TensorView input_or_host(const char* name, nb::handle array, Accept accept);
    TensorView output_or_host(const char* name, nb::handle array, Accept accept);

    const char* op() const { return op_; }
    nb::handle first_array() const { return first_array_; }
    const ArrayType& first_type() const { return first_type_; }
    const TensorView& first_view() const { return first_view_; }
    void* stream() const { return stream_; }
    bool is_of_dispatcher() const { return is_of_dispatcher_; }

    // The work will wait for what `producer` holds when it is launched.
    void order_after(void* producer);

    // Runs the operator without the interpreter lock.
    template <class Work>
    void run(const Work& work) {
        const InterpreterUnlocked unlocked;
        before_work();
        work();
        after_work();
    }

  private:
    TensorView import(const char* name, nb::handle array, Accept accept, bool writes,
                      bool may_be_on_host = false);
    TensorView with_unit_stride(const TensorView& wide);
    nb::object array_of_list(const char* name, nb::handle list);
    nb::object words_of_bools(const char* name, nb::handle bools);
    [[noreturn]] void refuse_device(const char* name, Device device) const;
    std::optional<int64_t> enter_device(const char* name, const ArrayType& type, Device device,
                                        bool may_be_on_host);
    Loan borrow(const char* name, nb::handle array, const ArrayType& type, std::optional<int64_t> stream,
                Accept accept) const;
    void before_work() const;
    void after_work() const;

    const char* op_;
    bool is_of_dispatcher_;
    std::optional<void*> wanted_stream_;
    nb::handle first_array_;
    ArrayType first_type_;
    TensorView first_view_;
    std::optional<Device> device_;
    void* stream_ = nullptr;             // cudaStream_t; unused on the CPU
    ArrayType first_on_device_;          // of the first array but for those in host memory
    std::optional<void*> first_stream_;  // the current one of its library
    std::vector<void*> producers_;       // streams that ours waits for
    bool wait_for_work_ = false;
    std::optional<bool> has_tangents_;  // any of torch's tensors; unknown before the first
    std::vector<Loan> loans_;
    std::vector<nb::object> made_;                    // arrays, of lists and of bools
    std::vector<std::unique_ptr<int64_t[]>> copied_;  // integers that lay apart
};

}  // namespace octavo::bindings
