// Which blocks a CTA of the stream-K kernel owns.
//
// Ranges are equal in cost (stream_k_schedule.cuh). Reading is bound by the memory, not by the number of SMs:
// half of them almost saturate it. So ranges need not be quite equal, and where all items are alike they end
// where items end.
#pragma once

#include "cuda/decode/stream_k_schedule.cuh"

namespace octavo::cuda {

// The division of `total` into `count` shares, of which the first few have one more than the rest.
struct Shares {
    int32_t size = 1, larger = 0;

    Shares() = default;
    __device__ Shares(int32_t total, int32_t count) : size(total / count), larger(total - size * count) {}

    __device__ int32_t begin(int32_t i) const { return i * size + min(i, larger); }
    __device__ int32_t owner(int32_t place) const {
        const int32_t in_larger = larger * (size + 1);
        return place < in_larger ? place / (size + 1) : larger + (place - in_larger) / size;
    }
};

// Equal ranges, except that a range that would end near an item's end ends there instead. Only items that are
// cut by the end of a range have partial results of several CTAs.
template <int kSnap>
struct EqualRanges {
    Shares shares;

    EqualRanges() = default;
    __device__ EqualRanges(int32_t total, int32_t count) : shares(total, count) {}

    // Moves a boundary right before block `block` of an item, which has `count`, to an end of it if that is
    // near.
    __device__ int32_t snap(int32_t block, int32_t count) const {
        const int32_t reach = min(max(kSnap, shares.size / 32), (shares.size - 1) / 2);
        const int32_t down = block, up = count - block;
        if (min(down, up) > reach) return block;
        return down <= up ? 0 : count;
    }

    // The first CTA that has blocks of an item of `count` blocks, where `cost` comes before the first of
    // them.
    __device__ int32_t first_cta(int32_t cost, int32_t count) const {
        const int32_t cta = shares.owner(cost), next_begin = shares.begin(cta + 1) - cost;
        const bool is_snapped = next_begin < count && snap(next_begin, count) == 0;
        return is_snapped ? cta + 1 : cta;
    }
};

template <class Config>
class StreamKRange {
  public:
    using Batch = Schedule<Config>;

    int32_t begin = 0, end = 0;  // blocks
    Item begin_item{};           // the item that holds the first block, or ends right before it

    __device__ StreamKRange(const Batch& schedule, int32_t cta) : cta_(cta) {
        const int32_t num_ctas = gridDim.x;
        const int32_t items = schedule.num_items(), count = schedule.uniform_count();
        if (count > 0 && items <= num_ctas) {
            // Each item has CTAs of its own, unless these would leave many SMs idle. Combining more than 32
            // takes as long as they save.
            const int32_t room = num_ctas / items;
            ctas_per_item_ = max(count / Config::kMinBlocks, 1);
            if (ctas_per_item_ > 32) ctas_per_item_ = max(32, ctas_per_item_ / 2);
            if (ctas_per_item_ <= room || 8 * items * room >= 7 * num_ctas) {
                ctas_per_item_ = min(room, ctas_per_item_);
                const int32_t item = cta / ctas_per_item_;
                if (item >= items) return;
                const Shares shares(count, ctas_per_item_);
                begin_item = schedule.find(item * count);
                begin = begin_item.begin + shares.begin(cta - item * ctas_per_item_);
                end = begin_item.begin + shares.begin(cta - item * ctas_per_item_ + 1);
                cost_begin_ = begin, cost_end_ = end;
                return;
            }
            ctas_per_item_ = 0;
        }
        const int32_t items_per_cta = (items + num_ctas - 1) / num_ctas;
        if (count > 0 && 8 * items >= 7 * items_per_cta * num_ctas) {
            begin = min(cta * items_per_cta, items) * count;
            end = min((cta + 1) * items_per_cta, items) * count;
            if (begin < end) begin_item = schedule.find(begin);
            cost_begin_ = begin, cost_end_ = end;
            return;
        }
        const int32_t total = schedule.total_cost();
        const int32_t num_ranges = min(num_ctas, (total + Config::kMinBlocks - 1) / Config::kMinBlocks);
        if (cta >= num_ranges) return;
        ranges_ = EqualRanges<Config::kSnapBlocks>(total, num_ranges);
        const Boundary first = boundary(schedule, cta), last = boundary(schedule, cta + 1);
        begin = first.block, cost_begin_ = first.cost;
        end = last.block, cost_end_ = last.cost;
        begin_item = first.item;
        cost_before_begin_item_ = schedule.cost_before(begin_item);
    }

    // The blocks [x, y) of a warp.
    __device__ int2 of_warp(const Batch& schedule, int warp) const {
        auto share = [&](int i) { return cost_begin_ + (cost_end_ - cost_begin_) * i / Config::kWarps; };
        if (schedule.item_cost() == 0) return {share(warp), share(warp + 1)};
        auto block_at = [&](int32_t cost) {
            const auto place = schedule.find_cost(cost);
            return place.item.begin + place.block;
        };
        return {block_at(share(warp)), block_at(share(warp + 1))};
    }

    // The CTA in whose range this range's first item begins. It is used where that item began earlier.
    __device__ int32_t first_cta_of_begin_item() const {
        if (ctas_per_item_ > 0) return cta_ / ctas_per_item_ * ctas_per_item_;
        return ranges_.first_cta(cost_before_begin_item_, begin_item.end - begin_item.begin);
    }

  private:
    // Where the range of a CTA begins and that of the CTA before it ends.
    struct Boundary {
        Item item;
        int32_t block, cost;
    };
    __device__ Boundary boundary(const Batch& schedule, int32_t cta) const {
        const auto place = schedule.find_cost(ranges_.shares.begin(cta));
        const int32_t block = ranges_.snap(place.block, place.item.end - place.item.begin);
        return {place.item, place.item.begin + block,
                place.item_cost_at + (block > 0 ? schedule.item_cost() + block : 0)};
    }

    int32_t cta_;
    int32_t cost_begin_ = 0, cost_end_ = 0;
    int32_t cost_before_begin_item_ = 0;
    int32_t ctas_per_item_ = 0;  // if CTAs have one item each
    EqualRanges<Config::kSnapBlocks> ranges_;
};

}  // namespace octavo::cuda
