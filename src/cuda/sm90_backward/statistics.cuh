// How consumers read a number for each query.
#pragma once

#include "cuda/ptx/load_shared.h"
#include "cuda/sm90_backward/tiles.h"

namespace octavo::cuda {

// The numbers of a lane's queries, from a tile of them in shared memory, in the order of statistic_place().
// The reads are wide, since each one is slow: products take most of what shared memory gives.
template <class Config>
class LaneStatistics {
  public:
    __device__ explicit LaneStatistics(const float* tile)
        : first_(ptx::shared_address(tile + statistic_place<Config::kQueries>(2 * (threadIdx.x % 4)))) {}
    // Those of four columns: of scores 8 i and 8 i + 1, where scores 8 i + 2 and 8 i + 3 are as well, and of
    // scores 8 i + 4 and 8 i + 5.
    __device__ __forceinline__ float4 of(int i) const {
        const uint4 x = ptx::load_shared_16(first_ ^ (16 * i));  // a lane's pieces are aligned together
        return {__uint_as_float(x.x), __uint_as_float(x.y), __uint_as_float(x.z), __uint_as_float(x.w)};
    }

  private:
    const uint32_t first_;
};

}  // namespace octavo::cuda
