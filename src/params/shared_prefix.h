// Attention over sequences that begin with the same pages, in two passes whose results are combined by their
// LSE: cascade inference (Ye et al. 2025 (FlashInfer), arXiv:2501.01005; Juravsky et al. 2024 (Hydragen),
// arXiv:2402.05099). Sinks are added to the combined result.
#pragma once

#include "params/attention_params.h"

namespace octavo {

// The pass of all queries over the shared prefix, cut into runs of `run_len` keys: a batch with one sequence
// per run, each with all queries. Nothing is masked in it. Results, [runs, total_q, num_q_heads, ...], go to
// `out` and `lse`.
inline AttentionParams over_shared_prefix(AttentionParams p, int32_t run_len, void* out, float* lse) {
    p.batch = (p.shared_prefix_len + run_len - 1) / run_len;
    p.cu_seqlens_q = {};
    p.seqlen_q = static_cast<int32_t>(p.total_q);
    p.total_q *= p.batch;
    p.q_batch_stride = 0;
    p.seq_lens = {};
    p.seqlen_k = run_len;
    p.total_k = p.shared_prefix_len;
    p.page_table_stride = run_len / p.page_size;
    p.prefix_lens = {};
    p.has_tree_mask = false;
    p.tree_mask = nullptr;
    p.sinks = nullptr;
    p.window_right = -1;
    p.shared_prefix_len = 0;
    p.out = out;
    p.out_head_stride = p.head_dim_v;
    p.out_token_stride = p.num_q_heads * p.out_head_stride;
    p.out_batch_stride = p.seqlen_q * p.out_token_stride;
    p.lse = lse;
    p.lse_head_stride = 1;
    p.lse_token_stride = p.num_q_heads;
    p.lse_batch_stride = p.seqlen_q * p.lse_token_stride;
    return p;
}

// The pass of each sequence's queries over its keys behind the prefix; `lse`, in C order, is used where the
// call asks for none. A query that sees none of these keys belongs to a sequence of length 0, so that this
// pass's result, with an LSE of -inf, is the final one.
inline AttentionParams after_shared_prefix(AttentionParams p, float* lse) {
    if (!p.lse) {
        p.lse = lse;
        p.lse_head_stride = 1;
        p.lse_batch_stride = p.lse_token_stride = p.num_q_heads;
    }
    p.page_table = p.page_table.from(p.shared_prefix_len / p.page_size);
    p.num_skipped_keys = p.shared_prefix_len;
    p.seqlen_k -= p.shared_prefix_len;
    p.shared_prefix_len = 0;
    p.sinks = nullptr;
    return p;
}

}  // namespace octavo
