// From the arguments of the public operators to checked parameters: the only argument checks there are.
#pragma once

#include "params/attention_params.h"
#include "params/cache_params.h"
#include "params/merge_states_params.h"

#include <octavo/attention.h>
#include <octavo/paged_attention.h>

namespace octavo {

AttentionParams check_attention(const AttentionArgs& args);
AttentionParams check_paged_attention(const PagedAttentionArgs& args);
AppendKvParams check_append_kv(const AppendKvArgs& args);
CopyPagesParams check_copy_pages(const CopyPagesArgs& args);
MergeStatesParams check_merge_states(const MergeStatesArgs& args);

}  // namespace octavo
