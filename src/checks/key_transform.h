// The checks of the transformation of keys (params/key_transform.h) that append_kv and paged_attention share.
#pragma once

#include "checks/check.h"
#include "params/key_transform.h"

#include <octavo/tensor.h>

#include <array>
#include <cstdint>
#include <optional>
#include <utility>

namespace octavo {

struct KeyTransformArguments {
    const std::optional<TensorView>& offset;  // "k_channel_offset"
    const std::optional<TensorView>& scale;   // "k_channel_scale"
    bool rotates;                             // "rotate_keys"

    template <class Args>
    static KeyTransformArguments of(const Args& args) {
        return {args.k_channel_offset, args.k_channel_scale, args.rotate_keys};
    }
    std::array<std::pair<const char*, const std::optional<TensorView>*>, 2> arrays() const {
        return {{{"k_channel_offset", &offset}, {"k_channel_scale", &scale}}};
    }
};

// Checks the transformation of keys of `stored` codes; on the CPU also the values of its arrays.
KeyTransform check_key_transform(const Checker& check, const KeyTransformArguments& given, DType stored,
                                 int64_t num_kv_heads, int64_t head_dim);

}  // namespace octavo
