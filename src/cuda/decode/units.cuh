// Work cut in places that follow from a sequence alone, so that its bits do not depend on its batch.
//
// An item is cut into segments of equal length, and as many of these as a CTA has warps make a unit. Results
// add up in one order: blocks in a segment, segments in a unit, units in the item. Who computes them does not
// matter: the warps of a CTA take a segment each, or, of items of one unit that follow each other, an item
// each.
#pragma once

#include "cuda/decode/runs.cuh"
#include "cuda/decode/segments.cuh"

namespace octavo::cuda {

// Long items have so many units that one sequence fills the device, if its heads allow.
constexpr int kMaxUnits = 32, kMaxUnitsOfSequence = 128;

template <class Config>
class Units {
  public:
    Units() = default;
    explicit Units(int32_t num_kv_heads)
        : max_units_(std::clamp(kMaxUnitsOfSequence / num_kv_heads, 1, kMaxUnits)) {}

    OCTAVO_HD int32_t max_units() const { return max_units_; }  // of an item

    // The blocks of a segment of an item of `count` blocks.
    __device__ int32_t segment_size(int32_t count) const {
        const int32_t units = min(max(count / (Config::kWarps * kMinSegment), 1), max_units_);
        return (count - 1) / (Config::kWarps * units) + 1;
    }
    __device__ int32_t segment_size(const Item& item) const { return segment_size(item.end - item.begin); }
    __device__ int32_t unit_size(const Item& item) const { return Config::kWarps * segment_size(item); }
    __device__ int32_t num_units(const Item& item) const {
        return (item.end - item.begin - 1) / unit_size(item) + 1;
    }

    // Whether one unit holds the item.
    __device__ bool is_short(const Item& item) const {
        return item.end - item.begin < 2 * Config::kWarps * kMinSegment;
    }

    // The end of a unit next to block `block` of an item.
    __device__ int32_t round(int32_t block, const Item& item) const {
        const int32_t size = unit_size(item), units = (block - item.begin + size / 2) / size;
        return min(item.begin + units * size, item.end);
    }

  private:
    // Adding up a unit takes as long as some blocks: longer for more rows, while blocks of few dims are
    // short.
    static constexpr int kMinSegment = (Config::kRowTiles == 1 ? 4 : 16) * (Config::kHeadDim <= 64 ? 2 : 1);

    int32_t max_units_;
};

// Which units a CTA owns.
template <class Config>
class UnitRun {
  public:
    int32_t begin = 0, end = 0;  // blocks

    __device__ UnitRun(const Schedule<Config::kThreads>& schedule, const Units<Config>& units) {
        const int32_t cta = blockIdx.x, num_ctas = gridDim.x, total = schedule.total();
        const int32_t items = schedule.num_items(), count = schedule.uniform_count();
        const int32_t items_per_cta = (items + num_ctas - 1) / num_ctas;
        if (count > 0 && items > num_ctas && 8 * items >= 7 * items_per_cta * num_ctas) {
            begin = min(cta * items_per_cta, items) * count;  // whole items
            end = min((cta + 1) * items_per_cta, items) * count;
            return;
        }
        int32_t num_runs = min(num_ctas, (total + Config::kMinBlocks - 1) / Config::kMinBlocks);
        if (count > 0 && items <= num_runs) num_runs = num_runs / items * items;
        if (cta >= num_runs) return;
        shares_ = Shares(total, num_runs);
        begin = round(schedule, units, shares_.begin(cta));
        end = cta + 1 == num_runs ? total : round(schedule, units, shares_.begin(cta + 1));
    }

    __device__ bool holds(const Item& item) const { return begin <= item.begin && item.end <= end; }

    // A number below that of the CTAs, the item's own among those that CTAs share.
    __device__ int32_t id(const Item& item) const { return shares_.owner(item.begin); }

  private:
    __device__ static int32_t round(const Schedule<Config::kThreads>& schedule, const Units<Config>& units,
                                    int32_t block) {
        return units.round(block, schedule.find(block));
    }

    Shares shares_;
};

// What the warps of a CTA do at a time: a unit of an item, a segment each, or several items, one each.
struct UnitStep {
    Item item;           // the first one
    int32_t begin, end;  // blocks
    int32_t segment;     // blocks of a segment of a unit
    int32_t num_items;   // 0: a unit
};

// The steps of a CTA's run, and what one of its warps has of them.
template <class Config>
class UnitWalk {
  public:
    struct Position : Segment {
        UnitStep step;
    };

    __device__ UnitWalk(const Schedule<Config::kThreads>& schedule, const Units<Config>& units,
                        const UnitRun<Config>& run, const Item& item)
        : schedule_(schedule), units_(units), end_(run.end) {
        first_step_ = first_.step = step_at(item, run.begin);
        empty_ = !settle(first_);
    }

    __device__ const UnitStep& first_step() const { return first_step_; }

    // For the copies: blocks that follow each other, over steps in which this warp has none.
    __device__ bool empty() const { return empty_; }
    __device__ const Position& first() const { return first_; }
    __device__ bool advance(Position& position) const { return advance(position.step) && settle(position); }

    // To the step after this one; false if there is none.
    __device__ bool advance(UnitStep& step) const {
        if (step.end >= end_) return false;
        Item item = step.item;
        if (step.end >= item.end) item = schedule_.skip(item, max(step.num_items, 1));
        step = step_at(item, step.end);
        return true;
    }

    // This warp's blocks.
    __device__ Segment segment(const UnitStep& step) const {
        const int warp = threadIdx.x / 32;
        Segment segment{step.item, step.end, step.end};
        if (step.num_items == 0) {
            segment.begin = min(step.begin + warp * step.segment, step.end);
            segment.end = min(segment.begin + step.segment, step.end);
        } else if (warp < step.num_items) {
            segment.item = schedule_.skip(step.item, warp);
            segment.begin = segment.item.begin;
            segment.end = segment.item.end;
        }
        return segment;
    }

  private:
    __device__ UnitStep step_at(const Item& item, int32_t begin) const {
        const int32_t items = units_.is_short(item) ? short_items(item) : 0;
        if (2 * items >= Config::kWarps) {  // with fewer, most warps would have nothing to do
            return {item, begin, schedule_.skip(item, items - 1).end, 0, items};
        }
        const int32_t size = units_.segment_size(item);
        return {item, begin, min(begin + Config::kWarps * size, item.end), size, 0};
    }
    // Items of one unit from this one on, as many as there are warps at most.
    __device__ int32_t short_items(Item item) const {
        int32_t items = 0;
        for (;;) {
            const int32_t count = item.end - item.begin;
            int32_t more = min(schedule_.num_kv_heads() - item.kv_head, Config::kWarps - items);
            while (item.begin + (more - 1) * count >= end_) --more;
            items += more;
            if (items == Config::kWarps || item.begin + more * count >= end_) return items;
            item = schedule_.skip(item, more);
            if (!units_.is_short(item)) return items;
        }
    }
    // To the first step from this one on in which this warp has blocks; false if there is none.
    __device__ bool settle(Position& position) const {
        do {
            static_cast<Segment&>(position) = segment(position.step);
            if (position.begin < position.end) return true;
        } while (advance(position.step));
        return false;
    }

    const Schedule<Config::kThreads>& schedule_;
    const Units<Config>& units_;
    UnitStep first_step_;
    Position first_;
    int32_t end_;
    bool empty_;
};

}  // namespace octavo::cuda
