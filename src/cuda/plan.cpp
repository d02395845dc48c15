#include "cuda/plan.h"

#include "cuda/warp_rows.h"

namespace octavo::cuda {

std::ostream& operator<<(std::ostream& out, const Counted& counted) {
    return out << counted.count << " " << counted.noun << (counted.count == 1 ? "" : "s");
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
