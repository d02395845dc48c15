// The checks of the rotary embedding that append_kv applies, and of the queries that it rotates.
#pragma once

#include "checks/check.h"
#include "params/cache_params.h"

#include <octavo/paged_attention.h>

namespace octavo {

// Sets the parameters of both, from arguments whose k is checked.
void check_rotary(const Checker& check, const AppendKvArgs& args, AppendKvParams& p);

// Checks in host memory that the tables reach the positions of all new tokens.
void check_positions_in_host(const char* op, const AppendKvParams& p);

}  // namespace octavo
