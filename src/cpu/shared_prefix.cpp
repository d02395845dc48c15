#include "params/shared_prefix.h"

#include "cpu/backend.h"

#include <cmath>
#include <cstring>
#include <memory>

namespace octavo::cpu {

void shared_prefix_attention(const AttentionParams& p) {
    const int64_t rows = p.total_q * p.num_q_heads;
    const std::unique_ptr<char[]> prefix_out(new char[rows * p.head_dim_v * size_of(p.dtype)]);
    const std::unique_ptr<float[]> prefix_lse(new float[rows]), lse(new float[rows]);
    AttentionParams prefix = over_shared_prefix(p, p.shared_prefix_len, prefix_out.get(), prefix_lse.get());
    prefix.sinks = p.sinks;
    const AttentionParams rest = after_shared_prefix(p, lse.get());
    attention(prefix);  // first: `out` may be q
    attention(rest);

    for (int32_t b = 0; b < p.batch; ++b) {
        if (p.seq_lens[b] > 0) continue;  // else there is no prefix either
        for (int64_t token = p.first_token(b); token < p.first_token(b + 1); ++token) {
            for (int32_t head = 0; head < p.num_q_heads; ++head) {
                const int64_t row = token * p.num_q_heads + head, row_bytes = p.head_dim_v * size_of(p.dtype);
                prefix_lse[row] = p.sinks ? p.sinks[head] : -INFINITY;
                std::memset(&prefix_out[row * row_bytes], 0, row_bytes);
            }
        }
    }
    MergeStatesParams merge{};
    merge.dtype = p.dtype;
    merge.device = p.device;
    merge.head_dim = p.head_dim_v;
    auto set = [](int64_t (&strides)[3], int64_t token, int64_t head) {
        strides[1] = token;
        strides[2] = head;
    };
    merge.shape[0] = 1;
    set(merge.shape, p.total_q, p.num_q_heads);
    merge.out_a = prefix.out;
    merge.lse_a = prefix.lse;
    merge.out_b = merge.out = rest.out;
    merge.lse_b = merge.lse = rest.lse;
    set(merge.out_a_strides, prefix.out_token_stride, prefix.out_head_stride);
    set(merge.lse_a_strides, prefix.lse_token_stride, prefix.lse_head_stride);
    set(merge.out_b_strides, rest.out_token_stride, rest.out_head_stride);
    set(merge.lse_b_strides, rest.lse_token_stride, rest.lse_head_stride);
    set(merge.out_strides, rest.out_token_stride, rest.out_head_stride);
    set(merge.lse_strides, rest.lse_token_stride, rest.lse_head_stride);
    merge_states(merge);
}

}  // namespace octavo::cpu
