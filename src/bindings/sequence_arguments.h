// Arguments of the page allocator: handles and batches of integers.
#pragma once

#include <octavo/page_allocator.h>

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace octavo::bindings {

namespace nb = nanobind;

Sequence sequence_argument(const char* call, nb::handle seq);

// A list or tuple of ints, or any other iterable of them. One-dimensional arrays of int64 too.
std::vector<Sequence> sequences_argument(const char* call, nb::handle seqs, const char* name = "seqs");

// Integers of 32 bits: a contiguous int32 array in CPU memory as it is; an int64 one, or any iterable of
// ints.
class Int32Batch {
  public:
    Int32Batch(const char* call, const char* name, nb::handle values);
    const int32_t* data() const { return array_ ? array_->data() : values_.data(); }
    int64_t size() const { return static_cast<int64_t>(array_ ? array_->size() : values_.size()); }

  private:
    std::optional<nb::ndarray<const int32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>> array_;
    std::vector<int32_t> values_;
};

// num_new_tokens: an int for every one of `count` sequences, or one for each.
class NewTokens {
  public:
    NewTokens(const char* call, nb::handle given, int64_t count);
    const int32_t* data() const { return each_ ? each_->data() : same_.data(); }

  private:
    std::vector<int32_t> same_;
    std::optional<Int32Batch> each_;
};

std::string namespace_argument(const char* call, nb::handle name);  // str or bytes

}  // namespace octavo::bindings
