// Which blocks a CTA owns.
//
// Reading is bound by the memory, not by the number of SMs: half of them nearly draw its bandwidth. So runs
// need not be quite equal, and where all items are alike they end where items end.
#pragma once

#include "cuda/decode/schedule.cuh"

namespace octavo::cuda {

// `total` blocks in `count` shares, of which the first few have one block more than the rest.
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

// The CTAs that share an item.
struct CutItem {
    int32_t first, last;
};

// Equal runs, except that one which would end near an item's end ends there instead. Only items that a run's
// end cuts need a merge across CTAs.
template <int kSnap>
struct EqualRuns {
    Shares shares;

    EqualRuns() = default;
    __device__ EqualRuns(int32_t total, int32_t count) : shares(total, count) {}

    // Where the boundary at `raw`, which lies in [item.begin, item.end), goes.
    __device__ int32_t snap(int32_t raw, const Item& item) const {
        const int32_t reach = min(max(kSnap, shares.size / 32), (shares.size - 1) / 2);
        const int32_t down = raw - item.begin, up = item.end - raw;
        if (min(down, up) > reach) return raw;
        return down <= up ? item.begin : item.end;
    }

    __device__ CutItem cut(const Item& item) const {
        CutItem cut{shares.owner(item.begin), shares.owner(item.end - 1)};
        const int32_t after_first = shares.begin(cut.first + 1), before_last = shares.begin(cut.last);
        if (after_first < item.end && snap(after_first, item) == item.begin) ++cut.first;
        if (before_last > item.begin && snap(before_last, item) == item.end) --cut.last;
        return cut;
    }
};

template <class Config>
class CtaRun {
  public:
    int32_t begin = 0, end = 0;  // blocks
    Item begin_item{};           // holds the first block, or ends right before it
    bool in_pair = false;        // the item is this cluster's: two CTAs

    // `pairs`: CTAs are launched in clusters of two.
    __device__ CtaRun(const Schedule<Config::kThreads>& schedule, bool pairs) {
        const int32_t cta = blockIdx.x, num_ctas = gridDim.x;
        const int32_t items = schedule.num_items(), count = schedule.uniform_count();
        if (count > 0 && items <= num_ctas) {
            // Each item has CTAs of its own: pairs, if that leaves most of the memory's bandwidth. The merge
            // of more than 32 takes as long as what they save.
            parts_ = max(count / Config::kMinBlocks, 1);
            parts_ = min(num_ctas / items, parts_ <= 32 ? parts_ : max(32, parts_ / 2));
            in_pair = pairs && parts_ >= 2 && 6 * items >= num_ctas;
            if (in_pair) parts_ = 2;
            const int32_t item = cta / parts_;
            if (item >= items) return;
            const Shares shares(count, parts_);
            begin_item = schedule.find(item * count);
            begin = begin_item.begin + shares.begin(cta - item * parts_);
            end = begin_item.begin + shares.begin(cta - item * parts_ + 1);
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
        const int32_t num_runs = min(num_ctas, (total + Config::kMinBlocks - 1) / Config::kMinBlocks);
        if (cta >= num_runs) return;
        runs_ = EqualRuns<Config::kSnapBlocks>(total, num_runs);
        const int32_t raw_begin = runs_.shares.begin(cta), raw_end = runs_.shares.begin(cta + 1);
        begin_item = schedule.find(raw_begin);
        end_item_ = schedule.find(min(raw_end, total - 1));
        begin = runs_.snap(raw_begin, begin_item);
        end = runs_.snap(raw_end, end_item_);
    }

    // The CTAs of the item that the begin (0) or the end (1) of the run cuts; if it cuts none, nothing of
    // use.
    __device__ CutItem cut(int which) const {
        if (parts_ > 0) {
            const int32_t first = static_cast<int32_t>(blockIdx.x) / parts_ * parts_;
            return {first, first + parts_ - 1};
        }
        Item item = begin_item;
        if (which == 1) item = end_item_;
        return runs_.cut(item);
    }

  private:
    int32_t parts_ = 0;  // of each item, if CTAs have one item each
    EqualRuns<Config::kSnapBlocks> runs_;
    Item end_item_{};
};

}  // namespace octavo::cuda
