#include "checks/cache_codes.h"

#include <algorithm>
#include <string>

namespace octavo {
namespace {

bool is_float8(DType dtype) { return dtype == DType::float8_e4m3fn || dtype == DType::float8_e5m2; }

DType stored_dtype(const Checker& check, const char* name, const TensorView& pages,
                   std::optional<DType> kv_dtype) {
    if (pages.dtype != DType::uint8) return pages.dtype;
    if (!kv_dtype) {
        fail<ValueError>(check.op(), name,
                         " (uint8) need kv_dtype, which says what they hold: ", kDtypesInBytes);
    }
    return *kv_dtype;
}

// Converts strides to words. The stride of an axis of one element does not matter, but must not be 0, by
// which static scales are known.
CacheScales to_words(const TensorView& scales, int64_t elements_per_word) {
    auto stride = [&](int axis) {
        return scales.shape[axis] > 1 ? scales.strides[axis] / elements_per_word : 1;
    };
    return {scales.data, stride(0), stride(1), stride(2)};
}

CacheScales check_static_array(const Checker& check, const char* name, const TensorView& scales,
                               int64_t num_kv_heads) {
    check.dtype(name, scales, DType::float32, "");
    const bool is_one = scales.size() == 1;
    if (scales.ndim > 1 || !(is_one || (scales.ndim == 1 && scales.shape[0] == num_kv_heads))) {
        fail<ValueError>(check.op(), name, " must be a number, or have shape [1] or [num_kv_heads] = [",
                         num_kv_heads, "]; got ", scales.shape_string());
    }
    check.data(name, scales, scales.ndim, "[num_kv_heads]");
    if (scales.device.type == DeviceType::cpu) {
        for (int64_t i = 0; i < scales.size(); ++i) {
            check_static_scale(check.op(), static_cast<const float*>(scales.data)[i], name, "[", i, "]");
        }
    }
    return {scales.data, 0, 0, is_one ? 0 : 1};
}

}  // namespace

StoredDtypes stored_dtypes(const Checker& check, const CacheArrays& cache, std::optional<DType> kv_dtype) {
    const auto& [k_name, k_pages, v_name, v_pages] = cache;
    if (!is_code(k_pages.dtype)) check.float_dtype(k_name, k_pages);
    if (kv_dtype) {
        if (!is_float8(*kv_dtype) && *kv_dtype != DType::int4) {
            fail<ValueError>(check.op(), "kv_dtype must be ", kDtypesInBytes, "; got ", to_string(*kv_dtype));
        }
        if (k_pages.dtype != DType::uint8 && v_pages.dtype != DType::uint8) {
            fail<ValueError>(check.op(), "kv_dtype (", to_string(*kv_dtype),
                             ") says what pages of uint8 hold; ", k_name, " is of ", to_string(k_pages.dtype),
                             ", ", v_name, " of ", to_string(v_pages.dtype));
        }
    }
    const StoredDtypes stored{stored_dtype(check, k_name, k_pages, kv_dtype),
                              stored_dtype(check, v_name, v_pages, kv_dtype)};
    if (stored.v == stored.k) return stored;
    if (stored.v == DType::int4) {
        if (stored.k == DType::int8) return stored;
        fail<TypeError>(check.op(), v_name, " (int4) need ", k_name, " of int4 or int8; got ",
                        to_string(stored.k));
    }
    if (stored.k == DType::int4)
        fail<TypeError>(check.op(), k_name, " (int4) need ", v_name, " of int4; got ", to_string(stored.v));
    fail<TypeError>(check.op(), v_name, " must be ", to_string(stored.k), " like ", k_name, "; got ",
                    to_string(stored.v));
}

void check_same_cache_shape(const Checker& check, const CacheArrays& cache) {
    const auto& [k_name, k_pages, v_name, v_pages] = cache;
    if (std::equal(k_pages.shape.begin(), k_pages.shape.begin() + 3, v_pages.shape.begin())) return;
    fail<ValueError>(check.op(), v_name, " must have the shape of ", k_name, " ", k_pages.shape_string(),
                     ", but for head_dim; got ", v_pages.shape_string());
}

CacheScales check_token_scales(const Checker& check, const char* name, const TensorView& scales, bool is_int4,
                               const TensorView& pages) {
    if (!is_int4) {
        check.dtype(name, scales, DType::float32, "");
        check.shape(name, scales, "[num_pages, page_size, num_kv_heads]",
                    {pages.shape[0], pages.shape[1], pages.shape[2]});
        return to_words(scales, 1);
    }
    check.dtype(name, scales, DType::float16, " (a scale and a minimum) for int4");
    check.shape(name, scales, "[num_pages, page_size, num_kv_heads, 2]",
                {pages.shape[0], pages.shape[1], pages.shape[2], 2});
    if (scales.size() == 0) return to_words(scales, 2);
    bool are_words = scales.strides[3] == 1 && reinterpret_cast<uintptr_t>(scales.data) % 4 == 0;
    for (int axis = 0; axis < 3; ++axis) {
        if (scales.shape[axis] > 1 && scales.strides[axis] % 2 != 0) are_words = false;
    }
    if (!are_words) {
        fail<ValueError>(check.op(), name, " must have a unit last stride and pairs aligned to 4 bytes; got ",
                         "strides ", scales.strides_string(), " at an address that is ",
                         reinterpret_cast<uintptr_t>(scales.data) % 4, " modulo 4");
    }
    return to_words(scales, 2);
}

CheckedScales check_scales(const Checker& check, const ScaleArguments& given, DType stored,
                           const TensorView& pages) {
    const auto& [pages_name, name, number, array, per_token_name, per_token] = given;
    const char* op = check.op();
    const std::string of = " (" + to_string(stored) + ")";
    CheckedScales scales{1.0f, {}, {}};
    if (number && array) fail<ValueError>(op, name, " must not be given both as a number and as an array");
    if (!is_code(stored)) {
        if (array)
            fail<ValueError>(op, name, " must be a number for ", pages_name, of,
                             "; arrays of scales belong to codes of 8 bits");
        if (per_token)
            fail<ValueError>(op, per_token_name, " belong to codes of 8 or 4 bits; ", pages_name, " hold ",
                             to_string(stored));
        if (number) check_static_scale(op, *number, name);
        scales.number = number.value_or(1.0f);
        return scales;
    }
    const bool is_int4 = stored == DType::int4, is_static = number || array;
    if (is_int4 && is_static) {
        fail<ValueError>(op, name, " must not be given for ", pages_name, of, ", which need ", per_token_name,
                         ", a scale and a minimum of each token and head");
    }
    if (is_static && per_token)
        fail<ValueError>(op, name, " and ", per_token_name, " must not both be given");
    if (is_int4 && !per_token) {
        fail<ValueError>(op, pages_name, of, " need ", per_token_name,
                         ": a scale and a minimum of each token and head");
    }
    if (stored == DType::int8 && !is_static && !per_token) {
        fail<ValueError>(op, pages_name, of, " need ", per_token_name, " or ", name,
                         ": what is stored is the value divided by its scale");
    }
    if (number) {
        check_static_scale(op, *number, name);
        scales.number = *number;
    }
    if (array) scales.in_memory = check_static_array(check, name, *array, pages.shape[2]);
    if (per_token)
        scales.of_each_token = check_token_scales(check, per_token_name, *per_token, is_int4, pages);
    return scales;
}

}  // namespace octavo
