// From the arguments of the public operators to checked parameters: the only argument checks there are.
#pragma once

#include "common/fail.h"
#include "params/attention_backward_params.h"
#include "params/attention_params.h"
#include "params/cache_params.h"
#include "params/latent_attention_params.h"
#include "params/linear_params.h"
#include "params/merge_states_params.h"
#include "params/paged_attention_params.h"
#include "params/rms_norm_params.h"

#include <octavo/attention.h>
#include <octavo/latent_attention.h>
#include <octavo/linear.h>
#include <octavo/paged_attention.h>
#include <octavo/rms_norm.h>

#include <string>

namespace octavo {

// Checks read values of arrays on the CPU only. What no CUDA kernel computes is refused for arrays on a GPU.
AttentionParams check_attention(const AttentionArgs& args);
PagedAttentionParams check_paged_attention(const PagedAttentionArgs& args);
AppendKvParams check_append_kv(const AppendKvArgs& args);
CopyPagesParams check_copy_pages(const CopyPagesArgs& args);
MergeStatesParams check_merge_states(const MergeStatesArgs& args);
AttentionBackwardParams check_attention_backward(const AttentionBackwardArgs& args);
LinearParams check_linear(const LinearArgs& args);
RmsNormParams check_rms_norm(const RmsNormArgs& args);
LatentAttentionParams check_latent_attention(const LatentAttentionArgs& args);

// The last axis of the result of attention(), of linear(), and of latent_attention(); arguments that do not
// fit are for the check to find.
int64_t attention_width(const AttentionArgs& args);
int64_t linear_width(const LinearArgs& args);
int64_t latent_attention_width(const LatentAttentionArgs& args);

// Why no CUDA kernel computes this, wherever its arrays are; empty if there is one.
std::string why_no_cuda_kernel(const AttentionParams& params);
std::string why_no_cuda_kernel(const AppendKvParams& params);
std::string why_no_cuda_kernel(const AttentionBackwardParams& params);
std::string why_no_cuda_kernel(const LinearParams& params);
std::string why_no_cuda_kernel(const LatentAttentionParams& params);
inline std::string why_no_cuda_kernel(const CopyPagesParams&) { return {}; }
inline std::string why_no_cuda_kernel(const MergeStatesParams&) { return {}; }
inline std::string why_no_cuda_kernel(const RmsNormParams&) { return {}; }

// Why Python has to refuse it too, which hands over products to the arrays' own library where Octavo has no
// kernel for them.
template <class Params>
std::string why_refused_on_cuda(const Params& params) {
    return why_no_cuda_kernel(params);
}
std::string why_refused_on_cuda(const LinearParams& params);

// Refuses arrays on a GPU for which there is none.
template <class Params>
void require_kernel(const char* op, const Params& params) {
    if (params.device.type != DeviceType::cuda) return;
    const std::string why_not = why_no_cuda_kernel(params);
    if (!why_not.empty()) fail<TypeError>(op, why_not);
}

}  // namespace octavo
