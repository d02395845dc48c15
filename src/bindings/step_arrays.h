// octavo.StepArrays: the caller's arrays that PageAllocator.step writes.
#pragma once

#include "bindings/import_array.h"

#include <octavo/page_allocator.h>

#include <nanobind/nanobind.h>

#include <optional>

namespace octavo::bindings {

class StepArraysObject {
  public:
    StepArraysObject(nb::handle page_table, nb::handle seq_lens, nb::handle cu_seqlens_q, nb::handle copies,
                     nb::handle positions, nb::handle last_rows, nb::handle slot_mapping);

    StepArrays& arrays() { return *arrays_; }
    nb::object num_copies() const;  // an int, or a tuple where page_table was given as one

  private:
    Call call_;  // what the arrays lent
    nb::list arrays_kept_;
    std::optional<StepArrays> arrays_;
    int64_t num_groups_ = 1;
    bool is_grouped_ = false;  // page_table was a list
};

}  // namespace octavo::bindings
