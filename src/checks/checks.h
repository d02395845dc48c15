// From the arguments of the public operators to checked parameters: the only argument checks there are.
#pragma once

#include "params/attention_params.h"
#include "params/cache_params.h"
#include "params/merge_states_params.h"

#include <octavo/attention.h>
#include <octavo/paged_attention.h>

#include <string>

namespace octavo {

// Checks read values of arrays on the CPU only. What no CUDA kernel computes is refused for arrays on a GPU.
AttentionParams check_attention(const AttentionArgs& args);
AttentionParams check_paged_attention(const PagedAttentionArgs& args);
AppendKvParams check_append_kv(const AppendKvArgs& args);
CopyPagesParams check_copy_pages(const CopyPagesArgs& args);
MergeStatesParams check_merge_states(const MergeStatesArgs& args);

// Why no CUDA kernel computes this, wherever its arrays are; empty if there is one.
std::string why_no_cuda_kernel(const AttentionParams& params);
std::string why_no_cuda_kernel(const AppendKvParams& params);
std::string why_no_cuda_kernel(const CopyPagesParams& params);
inline std::string why_no_cuda_kernel(const MergeStatesParams&) { return {}; }

}  // namespace octavo
