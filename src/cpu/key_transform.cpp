// paged_attention over keys that were transformed before they became codes: the queries are transformed as
// well, and the log-sum-exp gets what all scores of a query lack, before sinks join it.
#include "cpu/key_transform.h"

#include "common/online_softmax.h"
#include "cpu/backend.h"
#include "cpu/thread_pool.h"
#include "cpu/with_type.h"

#include <memory>

namespace octavo::cpu {
namespace {

constexpr int64_t kGrainRows = 64;  // queries of one head: fewer are not worth waking a thread

}  // namespace

void paged_attention(const PagedAttentionParams& p) {
    const KeyTransform& transform = p.key_transform;
    if (transform.is_identity()) return attention(p);
    const int64_t num_rows = p.total_q * p.num_q_heads;
    const std::unique_ptr<char[]> queries(new char[num_rows * p.head_dim * size_of(p.dtype)]);
    const std::unique_ptr<float[]> shifts(p.shifts_lse() ? new float[num_rows] : nullptr);  // of the LSE
    const std::unique_ptr<float[]> own_lse(p.adds_sinks() && !p.lse ? new float[num_rows] : nullptr);
    with_type(p.dtype, [&](auto type) {
        using T = decltype(type);
        parallel_for_ranges(num_rows, kGrainRows, [&](int64_t begin, int64_t end) {
            float row[kMaxHeadDim];
            for (int64_t i = begin; i < end; ++i) {
                const int64_t token = i / p.num_q_heads, head = i % p.num_q_heads;
                const int64_t kv_head = head / p.group_size();
                const T* from =
                    static_cast<const T*>(p.q) + token * p.q_token_stride + head * p.q_head_stride;
                if (shifts) {
                    float product = 0.0f;
                    for (int32_t d = 0; d < p.head_dim; ++d)
                        product += to_float(from[d]) * transform.offset_at(kv_head, d);
                    shifts[i] = p.query_scale * product;
                }
                transform_row(transform, from, p.head_dim, kv_head, KeyTransformSide::query, row);
                T* to = reinterpret_cast<T*>(queries.get()) + i * p.head_dim;
                for (int32_t d = 0; d < p.head_dim; ++d) from_float(row[d], to[d]);
            }
        });
    });
    const AttentionParams transformed = p.with_queries(queries.get(), own_lse.get());
    attention(transformed);
    if (!shifts) return;
    for (int64_t i = 0; i < num_rows; ++i) {
        const int64_t token = i / p.num_q_heads, head = i % p.num_q_heads;
        float& lse =
            transformed.lse[token * transformed.lse_token_stride + head * transformed.lse_head_stride];
        lse = KeyTransform::of_lse(lse, shifts[i]);
        if (!p.sinks) continue;
        const MergeWeights weights = MergeWeights::make(lse, p.sinks[head]);
        lse = weights.lse;
        with_type(p.dtype, [&](auto type) {
            auto* const row =
                static_cast<decltype(type)*>(p.out) + token * p.out_token_stride + head * p.out_head_stride;
            for (int32_t d = 0; d < p.head_dim_v; ++d)
                from_float(weights.merge(to_float(row[d]), 0.0f), row[d]);
        });
    }
}

}  // namespace octavo::cpu
