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

// Checks read values of arrays on the CPU only. Calls that no CUDA kernel computes are refused for arrays on
// a GPU.
AttentionParams check_attention(const AttentionArgs& args);
PagedAttentionParams check_paged_attention(const PagedAttentionArgs& args);
AppendKvParams check_append_kv(const AppendKvArgs& args);
CopyPagesParams check_copy_pages(const CopyPagesArgs& args);
MergeStatesParams check_merge_states(const MergeStatesArgs& args);
AttentionBackwardParams check_attention_backward(const AttentionBackwardArgs& args);
LinearParams check_linear(const LinearArgs& args);
LinearParams check_linear_for(const char* op, const LinearArgs& args);  // in the name of another operator
RmsNormParams check_rms_norm(const RmsNormArgs& args);
LatentAttentionParams check_latent_attention(const LatentAttentionArgs& args);

// The length of the last axis of the result. Arguments that do not fit give any number; the check finds them.
int64_t attention_width(const AttentionArgs& args);
int64_t paged_attention_width(const PagedAttentionArgs& args);
int64_t linear_width(const LinearArgs& args);
int64_t latent_attention_width(const LatentAttentionArgs& args);

// The reason why no CUDA kernel computes this call, wherever its arrays are; empty if one does.
std::string why_no_cuda_kernel(const AttentionParams& params);
std::string why_no_cuda_kernel(const AppendKvParams& params);
std::string why_no_cuda_kernel(const AttentionBackwardParams& params);
std::string why_no_cuda_kernel(const LinearParams& params);
std::string why_no_cuda_kernel(const LatentAttentionParams& params);
inline std::string why_no_cuda_kernel(const CopyPagesParams&) { return {}; }
inline std::string why_no_cuda_kernel(const MergeStatesParams&) { return {}; }
inline std::string why_no_cuda_kernel(const RmsNormParams&) { return {}; }

// The reason why Python has to refuse the call, too; empty if it need not. Where Octavo has no kernel for a
// product, Python hands it to the arrays' own library.
template <class Params>
std::string why_refused_on_cuda(const Params& params) {
    return why_no_cuda_kernel(params);
}
std::string why_refused_on_cuda(const LinearParams& params);

// Refuses arrays on a GPU if no CUDA kernel computes the call.
template <class Params>
void require_kernel(const char* op, const Params& params) {
    if (params.device.type != DeviceType::cuda) return;
    const std::string why_not = why_no_cuda_kernel(params);
    if (!why_not.empty()) fail<TypeError>(op, why_not);
}

}  // namespace octavo
