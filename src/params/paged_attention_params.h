// paged_attention, checked: plain data for both backends.
#pragma once

#include "params/attention_params.h"
#include "params/key_transform.h"

namespace octavo {

// paged_attention over keys that were stored transformed.
struct PagedAttentionParams : AttentionParams {
    KeyTransform key_transform;
    float query_scale;  // softmax_scale without the scale of codes; q . offset is multiplied by it

    // Whether a term has to be added to the log-sum-exp; sinks are added only after it.
    bool shifts_lse() const { return key_transform.offset && (lse || sinks); }
    bool adds_sinks() const { return key_transform.offset && sinks; }

    // The call over `transformed` queries, [total_q, num_q_heads, head_dim] in C order. Where sinks are added
    // after it, `own_lse`, in C order, is used if the call asks for no log-sum-exp.
    AttentionParams with_queries(const void* transformed, float* own_lse) const {
        AttentionParams p = *this;
        p.q = transformed;
        p.q_head_stride = head_dim;
        p.q_token_stride = p.q_batch_stride = int64_t{num_q_heads} * head_dim;
        if (!adds_sinks()) return p;
        p.sinks = nullptr;
        if (p.lse) return p;
        p.lse = own_lse;
        p.lse_head_stride = 1;
        p.lse_token_stride = p.lse_batch_stride = num_q_heads;
        return p;
    }
};

}  // namespace octavo
