// What a Python type of arrays offers.
#pragma once

#include "bindings/dlpack.h"

#include <octavo/tensor.h>

#include <nanobind/nanobind.h>

#include <optional>

namespace octavo::bindings {

namespace nb = nanobind;

enum class Framework : uint8_t { none, numpy, torch, cupy, jax, other };

struct ArrayType {
    Framework framework = Framework::none;          // none: not an array
    const dlpack::ExchangeApi* exchange = nullptr;  // null: not offered
    bool is_masked = false;                         // numpy.ma
    bool has_torch_dispatch = false;  // a subclass of torch.Tensor with its own __torch_dispatch__

    // Whether both have the same current stream at any time. Unknown libraries differ by their exchange
    // tables; of those that have none, none says what its stream is.
    bool is_of_library_of(const ArrayType& other) const {
        return framework == other.framework && exchange == other.exchange;
    }

    // The stream that the framework works on now; nothing where it does not say.
    std::optional<void*> current_stream(Device device) const;
};

// Looked up once for each type.
ArrayType array_type_of(nb::handle object);

inline bool is_array(nb::handle object) { return array_type_of(object).framework != Framework::none; }

}  // namespace octavo::bindings
