// The operators on the CPU. Parameters are checked, values of lengths and page ids included.
#pragma once

#include "ops/cache_params.h"
#include "ops/forward_params.h"
#include "ops/merge_states_params.h"

namespace octavo::cpu {

void forward(const ForwardParams& params);
void cascade(const ForwardParams& params);  // where there is a shared prefix
void append_kv(const AppendKvParams& params);
void copy_pages(const CopyPagesParams& params);
void merge_states(const MergeStatesParams& params);

}  // namespace octavo::cpu
