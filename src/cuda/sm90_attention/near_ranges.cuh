// Which of a sequence's bidirectional ranges matter to a run of its queries.
#pragma once

#include "params/bidirectional_ranges.h"

#include <cstdint>

namespace octavo::cuda {

// Those from the first to the last that holds one of the positions [first_pos, last_pos]: mostly one or none,
// which is kept here, since nothing hides the loads of a search between two row tiles.
class NearRanges : public RangeList {
  public:
    // All lanes of a warp call this together, and look at 32 ranges at once.
    __device__ __forceinline__ NearRanges(const BidirectionalRanges& ranges, int32_t batch, int32_t first_pos,
                                          int32_t last_pos)
        : RangeList{ranges.of_sequence(batch), 0} {
        int32_t first = 0, end = 0;
#pragma unroll 1
        for (int32_t base = 0; base < ranges.count; base += 32) {
            const int32_t i = base + static_cast<int32_t>(threadIdx.x % 32);
            const Range range = i < ranges.count ? Range{bounds[2 * i], bounds[2 * i + 1]} : Range{};
            const uint32_t near = __ballot_sync(
                ~0u, range.begin <= last_pos && range.end > first_pos && range.begin < range.end);
            if (near == 0) continue;
            const int32_t lane = __ffs(near) - 1;
            if (end == 0) {
                first = base + lane;
                only_ = {__shfl_sync(~0u, range.begin, lane), __shfl_sync(~0u, range.end, lane)};
            }
            end = base + 32 - __clz(near);
        }
        bounds = bounds.from(int64_t{2} * first);
        count = end - first;
    }

    __device__ Range range_of(int32_t pos) const {
        if (count > 1) return RangeList::range_of(pos);
        return only_.holds(pos) ? only_.from_first_key() : Range{INT32_MAX, 0};
    }

  private:
    Range only_{};  // where there are no others; of no key where there is none
};

}  // namespace octavo::cuda
