#include "checks/key_transform.h"

#include "checks/cache_codes.h"

#include <cmath>
#include <string>

namespace octavo {
namespace {

void check_values(const char* op, const char* name, const TensorView& array, bool is_divisor) {
    const auto* values = static_cast<const float*>(array.data);
    for (int64_t head = 0; head < array.shape[0]; ++head) {
        for (int64_t dim = 0; dim < array.shape[1]; ++dim) {
            const float value = values[head * stride_of(array, 0) + dim];
            if (is_divisor) {
                check_static_scale(op, value, name, "[", head, ", ", dim, "]");
            } else if (!std::isfinite(value)) {
                fail<ValueError>(op, name, "[", head, ", ", dim, "] must be finite; got ", value);
            }
        }
    }
}

}  // namespace

KeyTransform check_key_transform(const Checker& check, const KeyTransformArguments& given, DType stored,
                                 int64_t num_kv_heads, int64_t head_dim) {
    const char* op = check.op();
    auto require_codes = [&](const char* name) {
        if (is_code(stored)) return;
        fail<ValueError>(op, name, " belongs to codes of 8 or 4 bits; k_pages hold ", to_string(stored));
    };
    for (const auto& [name, array] : given.arrays()) {
        if (!*array) continue;
        require_codes(name);
        check.dtype(name, **array, DType::float32, "");
        check.data(name, **array, 2, "[num_kv_heads, head_dim]");
        check.shape(name, **array, "[num_kv_heads, head_dim]", {num_kv_heads, head_dim});
        if ((*array)->device.type == DeviceType::cpu) check_values(op, name, **array, array == &given.scale);
    }
    if (given.rotates) require_codes("rotate_keys");
    KeyTransform transform{};
    auto set = [](const std::optional<TensorView>& array, const float*& data, int64_t& head_stride) {
        if (!array) return;
        data = static_cast<const float*>(array->data);
        head_stride = stride_of(*array, 0);
    };
    set(given.offset, transform.offset, transform.offset_head_stride);
    set(given.scale, transform.scale, transform.scale_head_stride);
    transform.rotates = given.rotates;
    return transform;
}

}  // namespace octavo
