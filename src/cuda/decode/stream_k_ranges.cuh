// Which blocks a CTA of the stream-K kernel owns.
//
// Reading is bound by the memory, not by the number of SMs: half of them almost saturate it. So ranges need
// not be quite equal, and where all items are alike they end where items end.
#pragma once

#include "cuda/decode/stream_k_schedule.cuh"

namespace octavo::cuda {

// The division of `total` blocks into `count` shares, of which the first few have one block more than the
// rest.
struct Shares {
    int32_t size = 1, larger = 0;

    Shares() = default;
    __device__ Shares(int32_t total, int32_t count) : size(total / count), larger(total - size * count) {}

    __device__ int32_t begin(int32_t i) const { return i * size + min(i, larger); }
    __device__ int32_t owner(int32_t block) const {
        const int32_t in_larger = larger * (size + 1);
        return block < in_larger ? block / (size + 1) : larger + (block - in_larger) / size;
    }
};

// Equal ranges, except that a range that would end near an item's end ends there instead. Only items that are
// cut by the end of a range have partial results of several CTAs.
template <int kSnap>
struct EqualRanges {
    Shares shares;

    EqualRanges() = default;
    __device__ EqualRanges(int32_t total, int32_t count) : shares(total, count) {}

    // Moves the boundary at `raw`, which must lie in [item.begin, item.end), to an end of the item if that is
    // near.
    __device__ int32_t snap(int32_t raw, const Item& item) const {
        const int32_t reach = min(max(kSnap, shares.size / 32), (shares.size - 1) / 2);
        const int32_t down = raw - item.begin, up = item.end - raw;
        if (min(down, up) > reach) return raw;
        return down <= up ? item.begin : item.end;
    }

    // The first CTA that has blocks of the item.
    __device__ int32_t first_cta(const Item& item) const {
        const int32_t cta = shares.owner(item.begin), next_begin = shares.begin(cta + 1);
        const bool is_snapped = next_begin < item.end && snap(next_begin, item) == item.begin;
        return is_snapped ? cta + 1 : cta;
    }
};

template <class Config>
class StreamKRange {
  public:
    int32_t begin = 0, end = 0;  // blocks
    Item begin_item{};           // the item that holds the first block, or ends right before it

    __device__ StreamKRange(const Schedule<Config::kThreads, Config::kBlockKeys>& schedule, int32_t cta)
        : cta_(cta) {
        const int32_t num_ctas = gridDim.x;
        const int32_t items = schedule.num_items(), count = schedule.uniform_count();
        if (count > 0 && items <= num_ctas) {
            // Each item has CTAs of its own. Combining more than 32 takes as long as they save.
            ctas_per_item_ = max(count / Config::kMinBlocks, 1);
            ctas_per_item_ =
                min(num_ctas / items, ctas_per_item_ <= 32 ? ctas_per_item_ : max(32, ctas_per_item_ / 2));
            const int32_t item = cta / ctas_per_item_;
            if (item >= items) return;
            const Shares shares(count, ctas_per_item_);
            begin_item = schedule.find(item * count);
            begin = begin_item.begin + shares.begin(cta - item * ctas_per_item_);
            end = begin_item.begin + shares.begin(cta - item * ctas_per_item_ + 1);
            return;
        }
        const int32_t items_per_cta = (items + num_ctas - 1) / num_ctas;
        if (count > 0 && 8 * items >= 7 * items_per_cta * num_ctas) {
            begin = min(cta * items_per_cta, items) * count;
            end = min((cta + 1) * items_per_cta, items) * count;
            if (begin < end) begin_item = schedule.find(begin);
            return;
        }
        const int32_t total = schedule.total();
        const int32_t num_ranges = min(num_ctas, (total + Config::kMinBlocks - 1) / Config::kMinBlocks);
        if (cta >= num_ranges) return;
        ranges_ = EqualRanges<Config::kSnapBlocks>(total, num_ranges);
        const int32_t raw_begin = ranges_.shares.begin(cta), raw_end = ranges_.shares.begin(cta + 1);
        begin_item = schedule.find(raw_begin);
        begin = ranges_.snap(raw_begin, begin_item);
        end = ranges_.snap(raw_end, schedule.find(min(raw_end, total - 1)));
    }

    // The CTA in whose range this range's first item begins. It is used where that item began earlier.
    __device__ int32_t first_cta_of_begin_item() const {
        return ctas_per_item_ > 0 ? cta_ / ctas_per_item_ * ctas_per_item_ : ranges_.first_cta(begin_item);
    }

  private:
    int32_t cta_;
    int32_t ctas_per_item_ = 0;  // if CTAs have one item each
    EqualRanges<Config::kSnapBlocks> ranges_;
};

}  // namespace octavo::cuda
