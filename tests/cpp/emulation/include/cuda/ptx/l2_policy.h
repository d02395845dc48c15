#pragma once
#include "cuda/ptx/cp_async.h"
namespace octavo::cuda::ptx { constexpr uint64_t kEvictFirst = 1, kEvictNormal = 2, kEvictLast = 3; }
