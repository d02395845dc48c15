// Where the kernels before the gradients leave the queries' terms of the gradients of sinks.
#pragma once

#include "params/attention_backward_params.h"

#include <cstdint>

namespace octavo::cuda {

struct SinkTerms {
    float* terms;      // [num_q_heads, num_rows]; null where no gradients of sinks are asked for
    int64_t num_rows;  // rows without a query hold 0

    static int64_t bytes(const AttentionBackwardParams& p, int64_t num_rows) {
        return p.dsinks ? p.num_q_heads * num_rows * int64_t{sizeof(float)} : 0;
    }
};

// Whether a query sees no key, but has a log-sum-exp because of its sink.
OCTAVO_HD bool has_sink_alone(const AttentionBackwardParams& p, int32_t batch, int32_t head, int32_t query) {
    if (!p.sinks) return false;
    const SequenceSlice seq = SequenceSlice::make(p, batch);
    return !p.block_mask.sees_any(seq.see, batch, head, query, seq.q_pos(query));
}

}  // namespace octavo::cuda
