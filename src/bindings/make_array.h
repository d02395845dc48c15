// Arrays for results: the caller's, or new ones in the framework of the call's first array.
#pragma once

#include "bindings/import_array.h"

#include <memory>

namespace octavo::bindings {

// Memory of ours that lends itself through DLPack, for frameworks whose allocator cannot be called.
class OwnedArray {
  public:
    OwnedArray(const TensorView& view, void* stream);  // shape, dtype and device; the stream that fills it

    const TensorView& view() const { return view_; }
    // The protocol's two methods. `stream`: None or DLPack's number of the consumer's stream.
    nb::object dlpack(nb::handle stream, nb::handle max_version, nb::handle dl_device, nb::handle copy) const;
    nb::tuple dlpack_device() const;

  private:
    TensorView view_;
    void* stream_;
    std::shared_ptr<void> memory_;
};

// Where an operator writes a result: the array that the caller gave as `out`, or a new one.
class ResultArray {
  public:
    // A new one has the shape and the dtype of `wanted`: that of the call's first array, or float32.
    ResultArray(Call& call, const char* name, nb::handle given, const TensorView& wanted);

    const TensorView& view() const { return view_; }
    bool is_new() const { return is_new_; }
    nb::object finish();  // when the work is launched

  private:
    void make_tensor(const Call& call);  // by torch, as its own
    void make_exchanged(const ArrayType& type);
    void make_owned(Call& call, const char* name);

    TensorView view_;
    bool is_new_ = true;
    nb::object array_;        // the result, or an OwnedArray that
    nb::object from_dlpack_;  // this function of the caller's framework will take over
};

}  // namespace octavo::bindings
