// The operators on the CPU. Parameters are checked, values of lengths and page ids included.
#pragma once

#include "params/attention_backward_params.h"
#include "params/attention_params.h"
#include "params/cache_params.h"
#include "params/latent_attention_params.h"
#include "params/linear_params.h"
#include "params/merge_states_params.h"
#include "params/padding.h"
#include "params/paged_attention_params.h"
#include "params/rms_norm_params.h"

#include <octavo/explain.h>

namespace octavo::cpu {

void attention(const AttentionParams& params);
void shared_prefix_attention(const AttentionParams& params);  // for a shared_prefix_len above 0
void paged_attention(const PagedAttentionParams& params);
void append_kv(const AppendKvParams& params);
void copy_pages(const CopyPagesParams& params);
void merge_states(const MergeStatesParams& params);
void attention_backward(const AttentionBackwardParams& params);
void linear(const LinearParams& params);
void rms_norm(const RmsNormParams& params);
void latent_attention(const LatentAttentionParams& params);
void clear_padding(const Padding& padding);

// What each would run.
Explanation explain(const AttentionParams& params);
Explanation explain(const AppendKvParams& params);
Explanation explain(const CopyPagesParams& params);
Explanation explain(const MergeStatesParams& params);
Explanation explain(const AttentionBackwardParams& params);
Explanation explain(const LinearParams& params);
Explanation explain(const RmsNormParams& params);
Explanation explain(const LatentAttentionParams& params);

}  // namespace octavo::cpu
