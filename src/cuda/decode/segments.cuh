// What a warp works through.
#pragma once

#include "cuda/decode/schedule.cuh"

namespace octavo::cuda {

// Blocks of one item that follow each other.
struct Segment {
    Item item;
    int32_t begin, end;  // counted like the item's
};

// The run of blocks from `begin`, in `item`, to `end`, across items.
template <int kThreads>
class RunWalk {
  public:
    using Position = Segment;

    __device__ RunWalk(const Schedule<kThreads>& schedule, const Item& item, int32_t begin, int32_t end)
        : schedule_(schedule), first_{item, begin, min(item.end, end)}, end_(end) {}

    __device__ const Segment& first() const { return first_; }
    // Whether there is something from here on; goes there.
    __device__ bool settle(Segment& segment) const { return segment.begin < segment.end; }
    __device__ const Segment& segment(const Segment& position) const { return position; }

    // To the segment after this one; false if there is none.
    __device__ bool advance(Segment& segment) const {
        if (segment.end >= end_) return false;
        segment.item = schedule_.next(segment.item);
        segment.begin = segment.item.begin;
        segment.end = min(segment.item.end, end_);
        return true;
    }

  private:
    const Schedule<kThreads>& schedule_;
    Segment first_;
    int32_t end_;
};

}  // namespace octavo::cuda
