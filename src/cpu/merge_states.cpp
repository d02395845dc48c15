#include "common/online_softmax.h"
#include "cpu/backend.h"
#include "cpu/thread_pool.h"
#include "cpu/with_type.h"

#include <algorithm>

namespace octavo::cpu {
namespace {

constexpr int64_t kGrainElements = 32 << 10;  // below, waking a thread costs more than it saves

template <class T>
void merge_typed(const MergeStatesParams& p) {
    const int64_t num_rows = p.shape[0] * p.shape[1] * p.shape[2];
    auto merge_row = [&](int64_t row) {
        const int64_t index[3] = {row / (p.shape[1] * p.shape[2]), row / p.shape[2] % p.shape[1],
                                  row % p.shape[2]};
        auto at = [&](const int64_t (&strides)[3]) {
            return index[0] * strides[0] + index[1] * strides[1] + index[2] * strides[2];
        };
        const MergeWeights weights =
            MergeWeights::make(p.lse_a[at(p.lse_a_strides)], p.lse_b[at(p.lse_b_strides)]);
        const T* a = static_cast<const T*>(p.out_a) + at(p.out_a_strides);
        const T* b = static_cast<const T*>(p.out_b) + at(p.out_b_strides);
        T* out = static_cast<T*>(p.out) + at(p.out_strides);
        for (int32_t d = 0; d < p.head_dim; ++d) {
            from_float(weights.merge(to_float(a[d]), to_float(b[d])), out[d]);
        }
        p.lse[at(p.lse_strides)] = weights.lse;
    };
    parallel_for_ranges(num_rows, std::max<int64_t>(1, kGrainElements / std::max(1, p.head_dim)),
                        [&](int64_t begin, int64_t end) {
                            for (int64_t row = begin; row < end; ++row) merge_row(row);
                        });
}

}  // namespace

void merge_states(const MergeStatesParams& p) {
    with_type(p.dtype, [&](auto type) { merge_typed<decltype(type)>(p); });
}

}  // namespace octavo::cpu
