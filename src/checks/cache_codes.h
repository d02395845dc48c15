// What pages hold, and the scales that codes need: the checks that the operators of a cache share.
#pragma once

#include "checks/check.h"
#include "params/cache_scales.h"

#include <octavo/tensor.h>

#include <cstdint>
#include <optional>

namespace octavo {

// The two arrays of a cache, by their names.
struct CacheArrays {
    const char* k_name;
    const TensorView& k_pages;
    const char* v_name;
    const TensorView& v_pages;
};

// What they hold: their own dtypes, or what kv_dtype says of those of uint8.
struct StoredDtypes {
    DType k, v;
};

// Refuses what cannot stand in one cache.
StoredDtypes stored_dtypes(const Checker& check, const CacheArrays& cache, std::optional<DType> kv_dtype);

// The numbers in a row of `length` elements.
constexpr int64_t numbers_in(DType stored, int64_t length) {
    return stored == DType::int4 ? 2 * length : length;
}

// v_pages has the shape of k_pages, but that rows of int4 have half the length.
void check_same_cache_shape(const Checker& check, const CacheArrays& cache, StoredDtypes stored);

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
    CacheScales in_memory;  // static ones, given as an array
    CacheScales of_each_token;
};

// Which scales a cache of `stored` has in pages of this shape; also their values where they are on the CPU.
CheckedScales check_scales(const Checker& check, const ScaleArguments& given, DType stored,
                           const TensorView& pages);

// Those of each token and KV head, of which the dtype of their array is right.
CacheScales check_token_scales(const Checker& check, const char* name, const TensorView& scales, bool is_int4,
                               const TensorView& pages);

}  // namespace octavo
