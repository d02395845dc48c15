// paged_attention, checked: plain data for both backends.
#pragma once

#include "params/attention_params.h"
#include "params/key_transform.h"

namespace octavo {

// paged_attention over keys that were stored transformed.
struct PagedAttentionParams : AttentionParams {
    KeyTransform key_transform;
    float query_scale;  // softmax_scale without the scale of codes: what q . offset is multiplied by

    // Whether there is something to add to the log-sum-exp.
    bool shifts_lse() const { return lse && key_transform.offset; }

    // The call over `transformed` queries, [total_q, num_q_heads, head_dim] in C order.
    AttentionParams with_queries(const void* transformed) const {
        AttentionParams p = *this;
        p.q = transformed;
        p.q_head_stride = head_dim;
        p.q_token_stride = p.q_batch_stride = int64_t{num_q_heads} * head_dim;
        return p;
    }
};

}  // namespace octavo
