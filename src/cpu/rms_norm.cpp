#include "cpu/backend.h"
#include "cpu/kernels.h"
#include "cpu/thread_pool.h"

#include <algorithm>

namespace octavo::cpu {
namespace {

constexpr int64_t kGrainElements = 32 << 10;  // below, waking a thread costs more than it saves

}  // namespace

void rms_norm(const RmsNormParams& p) {
    if (p.dim == 0) return;
    parallel_for_ranges(p.num_rows(), std::max<int64_t>(1, kGrainElements / p.dim),
                        [&](int64_t begin, int64_t end) { kernels().rms_norm.normalise(p, begin, end); });
}

}  // namespace octavo::cpu
