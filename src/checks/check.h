// The vocabulary of the argument checks. Each failure names the operator, the argument, the requirement
// and the value.
#pragma once

#include "common/fail.h"
#include "params/chosen_pages.h"
#include "params/index_array.h"

#include <octavo/tensor.h>

#include <cstdint>
#include <initializer_list>
#include <optional>
#include <string>

namespace octavo {

// Lengths and positions are 32-bit in the kernels; this leaves room to add a window without overflow.
constexpr int64_t kMaxLength = int64_t{1} << 30;

// The values that kv_dtype may have.
constexpr const char* kDtypesInBytes = "float8_e4m3fn, float8_e5m2 or int4";

constexpr const char* kPages = "[num_pages, page_size, num_kv_heads, head_dim]";

// An argument by its name; null where the call has none.
struct NamedInput {
    NamedInput(const char* input_name, const TensorView& array) : name(input_name), view(&array) {}
    NamedInput(const char* input_name, const std::optional<TensorView>& array)
        : name(input_name), view(array ? &*array : nullptr) {}

    const char* name;
    const TensorView* view;
};

// One operator's checks. `axes` describes a shape as messages show it: "[batch, num_q_heads, head_dim]".
class Checker {
  public:
    Checker(const char* op, Device device) : op_(op), device_(device) {}

    const char* op() const { return op_; }

    // Checks an array of floating-point data: number of axes, device, unit last stride.
    void data(const char* name, const TensorView& t, int ndim, const char* axes) const;
    // Checks what data() does, for an array that is written to.
    void output(const char* name, const TensorView& t, int ndim, const char* axes) const;
    // Checks the log-sum-exp that belongs to `out`.
    void lse(const char* name, const TensorView& t, const char* out_name, const TensorView& out) const;
    // Checks metadata: int32 or int64, contiguous along the last axis.
    IndexArray index(const char* name, const TensorView& t, int ndim, const char* axes) const;

    void dtype(const char* name, const TensorView& t, DType wanted, const char* of) const;
    void float_dtype(const char* name, const TensorView& t) const;
    // Checks the dtype of pages: that of `like`, or one of 8 bits.
    void cache_dtype(const char* name, const TensorView& t, const char* like_name,
                     const TensorView& like) const;
    // Checks the shape of an array of any strides.
    void shape(const char* name, const TensorView& t, const char* axes,
               std::initializer_list<int64_t> wanted) const;
    // Checks that `what`, which is `value` in array `name`, equals `other`, that of `other_name`.
    void equal(const char* what, const char* name, int64_t value, const char* other_name,
               int64_t other) const;
    // Checks that `name`, which has no `offsets`, has a row for each of the `batch` sequences of page_table.
    void row_each(const char* name, int64_t rows, int64_t batch, const char* offsets) const;
    void same_shape(const char* name, const TensorView& t, const char* other_name,
                    const TensorView& other) const;
    void length(const char* what, int64_t value, int64_t most = kMaxLength) const;  // 0 <= value <= most

    // Checks an array that is written to: no two indices may mean the same element.
    void writable(const char* name, const TensorView& t) const;
    // Checks that the ranges of bytes from the first element to the last do not overlap.
    void apart(const char* name, const TensorView& t, const char* other_name, const TensorView& other) const;
    void apart(const char* name, const TensorView& t, std::initializer_list<NamedInput> inputs) const;
    // Checks that the arrays share no element, though elements of the one may lie between those of the other:
    // keys and values, or codes and their scales, in one tensor. Both must be writable().
    void no_shared_elements(const char* name, const TensorView& t, const char* other_name,
                            const TensorView& other) const;

  private:
    void memory(const char* name, const TensorView& t) const;
    void unit_last_stride(const char* name, const TensorView& t) const;

    const char* op_;
    Device device_;
};

// The stride of an axis; 0 where the axis is too short for it to matter, so that equal layouts compare equal.
inline int64_t stride_of(const TensorView& t, int axis) { return t.shape[axis] > 1 ? t.strides[axis] : 0; }

struct Bytes {
    uintptr_t begin, end;
};

// The range from the first byte of the array's elements to past the last.
Bytes bytes_of(const TensorView& t);

// Whether both name the same elements in the same order.
bool same_elements(const TensorView& a, const TensorView& b);

// Checks that cu_seqlens (host memory, [batch + 1]) starts at 0, never falls, and ends at `total` or before:
// rows past its end are padding.
void check_cu_seqlens(const char* op, const char* name, const IndexArray& cu_seqlens, int64_t batch,
                      int64_t total);

// Checks in host memory that sequence b, of seq_lens[b] tokens, fits the table's columns and that its
// entries in use lie in [0, num_pages).
void check_pages_in_host(const char* op, const IndexArray& page_table, int64_t page_table_stride,
                         const IndexArray& seq_lens, int64_t batch, int64_t max_pages, int64_t page_size,
                         int64_t num_pages);

// The same for chosen pages; also checks that lists ascend and name pages of their sequence. The list of a
// sequence of length 0 is not looked at.
void check_chosen_pages_in_host(const char* op, const ChosenPages& chosen, const IndexArray& page_table,
                                int64_t page_table_stride, const IndexArray& seq_lens, int64_t batch,
                                int32_t num_kv_heads, int64_t max_pages, int64_t page_size,
                                int64_t num_pages);

// Checks in host memory that sequence b is not shorter than its new tokens: cu_seqlens[b + 1] - cu_seqlens[b]
// of them, or one if that is null. A sequence of length 0 is padding.
void check_new_tokens_in_host(const char* op, const IndexArray& seq_lens, const IndexArray& cu_seqlens,
                              int64_t batch);

}  // namespace octavo
