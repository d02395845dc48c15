// From the arguments of the public operators to checked parameters: the only argument checks there are.
#pragma once

#include "ops/cache_params.h"
#include "ops/forward_params.h"
#include "ops/merge_states_params.h"

#include <octavo/attention.h>
#include <octavo/paged_attention.h>

namespace octavo {

ForwardParams check_attention(const AttentionArgs& args);
ForwardParams check_paged_attention(const PagedAttentionArgs& args);
AppendKvParams check_append_kv(const AppendKvArgs& args);
CopyPagesParams check_copy_pages(const CopyPagesArgs& args);
MergeStatesParams check_merge_states(const MergeStatesArgs& args);

}  // namespace octavo
