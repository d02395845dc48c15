#include "cuda/plan.h"

#include "cuda/warp_rows.h"

namespace octavo::cuda {

std::ostream& operator<<(std::ostream& out, const Counted& counted) {
    return out << counted.count << " " << counted.noun << (counted.count == 1 ? "" : "s");
}

std::string text_of_heads(int64_t num_kv_heads, int32_t group_parts) {
    const Counted heads = counted(num_kv_heads, "KV head");
    if (group_parts == 1) return text_of(heads);
    return text_of(heads, " x ", group_parts, " parts of the query heads");
}

Explanation describe_warp_rows(const char* kernel, DType dtype, int64_t num_rows, const char* noun) {
    Explanation text;
    text.kernel = text_of(kernel, "<", to_string(dtype), ">");
    text.summary = text_of(counted(num_rows, noun), ", a warp each");
    text.plan = {
        {"dtype", to_string(dtype)},
        {"num_rows", num_rows},
        {"num_ctas", int64_t{blocks_for_rows(num_rows)}},
        {"threads", 32 * kRowsPerBlock},
    };
    return text;
}

}  // namespace octavo::cuda
