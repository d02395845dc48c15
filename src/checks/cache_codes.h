// The checks that the operators of a cache share: of what pages hold, and of the scales that codes need.
#pragma once

#include "checks/check.h"
#include "common/codes.h"
#include "params/cache_scales.h"

#include <octavo/tensor.h>

#include <cmath>
#include <cstdint>
#include <optional>

namespace octavo {

// The two arrays of a cache, and their names.
struct CacheArrays {
    const char* k_name;
    const TensorView& k_pages;
    const char* v_name;
    const TensorView& v_pages;
};

// What the two arrays hold: their own dtypes, or for arrays of uint8 what kv_dtype says.
struct StoredDtypes {
    DType k, v;
};

// Refuses dtypes that no cache may have, alone or together.
StoredDtypes stored_dtypes(const Checker& check, const CacheArrays& cache, std::optional<DType> kv_dtype);

// How many numbers a row of `length` elements holds.
constexpr int64_t numbers_in(DType stored, int64_t length) {
    return stored == DType::int4 ? 2 * length : length;
}

// Checks that v_pages has the shape of k_pages, but for the last axis.
void check_same_cache_shape(const Checker& check, const CacheArrays& cache);

// The three ways in which scales of keys, or of values, may be given.
struct ScaleArguments {
    const char* pages_name;  // "k_pages"
    const char* name;        // "k_scale"
    std::optional<float> number;
    const std::optional<TensorView>& array;
    const char* per_token_name;  // "k_scales"
    const std::optional<TensorView>& per_token;
};

struct CheckedScales {
    float number;           // 1 unless given
    CacheScales in_memory;  // static scales, if they were given as an array
    CacheScales of_each_token;
};

// Checks a number that keys or values are divided by before they become codes; `name...` names it in
// messages.
template <class... Name>
void check_static_scale(const char* op, float scale, const Name&... name) {
    if (!std::isfinite(scale) || !(scale > 0.0f))
        fail<ValueError>(op, name..., " must be finite and greater than 0; got ", scale);
    if (bits_of_float(scale) < kLeastScaleBits) {
        fail<ValueError>(op, name..., " must be at least 2^-126, as the inverse of a smaller number may be ",
                         "beyond float32; got ", scale);
    }
}

// Checks the scales of a cache of `stored` in pages of this shape; where they are on the CPU, also their
// values.
CheckedScales check_scales(const Checker& check, const ScaleArguments& given, DType stored,
                           const TensorView& pages);

// Checks the scales of each token and KV head, the dtype of whose array was checked.
CacheScales check_token_scales(const Checker& check, const char* name, const TensorView& scales, bool is_int4,
                               const TensorView& pages);

}  // namespace octavo
