// Work cut in places that follow from a sequence alone, so that its bits do not depend on its batch.
//
// An item is cut into leaves of equally many blocks, as many of these as a CTA has warps make a unit, and
// units that follow each other make a part, of which an item has no more than a CTA has warps. Results add up
// from the left on each of these levels. Who computes them does not matter: the warps of a CTA take a leaf
// each, or a unit, or a part, or a whole item.
#pragma once

#include "cuda/decode/runs.cuh"
#include "cuda/decode/segments.cuh"

namespace octavo::cuda {

// Long items have so many units that one sequence fills the device, if its heads allow.
constexpr int kMaxUnits = 32, kMaxUnitsOfSequence = 128;

constexpr int32_t floor_log2(int32_t x) { return x < 2 ? 0 : 1 + floor_log2(x / 2); }

template <class Config>
class Units {
  public:
    // Whether warps take units, parts and items of several units. With more dims a lane has no room for what
    // has been added up beside what is under way.
    static constexpr bool kByWarps = Config::kHeadDim <= 128;
    // Whether it has room for leaves that have been added up; otherwise a second piece in shared memory has.
    static constexpr bool kLeavesInRegisters = Config::kRowTiles == 1 && kByWarps;

    // Blocks of a leaf, at least: what a unit leaves is small beside its keys and values.
    static constexpr int kMinLeaf = Config::kWarps == 8 ? 1 : 4;
    static constexpr int kMinUnit = Config::kWarps * kMinLeaf;  // the only one of a short item

    Units() = default;
    __host__ __device__ static Units of_log2(int32_t max_units_log2) {
        Units units;
        units.max_units_log2_ = max_units_log2;
        return units;
    }
    int32_t log2() const { return max_units_log2_; }
    explicit Units(int32_t num_kv_heads)
        : max_units_log2_(floor_log2(std::clamp(kMaxUnitsOfSequence / num_kv_heads, 1, kMaxUnits))) {}

    // Of an item of up to so many blocks.
    int32_t most(int64_t blocks) const {
        if (blocks <= kMinUnit) return 1;
        int32_t units_log2 = kPartsLog2;
        while (int64_t{kMinUnit} << units_log2 < blocks) ++units_log2;
        return 1 << std::min(units_log2, max_units_log2_);
    }

    // How an item of `count` blocks is cut.
    struct Cut {
        int32_t unit, leaf;  // blocks
        int32_t part;        // units, a power of two
        __device__ int32_t num_units(int32_t count) const { return small_quotient(count - 1, unit) + 1; }
    };
    __device__ Cut cut(int32_t count) const {
        int32_t part_log2 = 0;
        if (kByWarps) {
            const int32_t units = (count - 1) >> kMinUnitLog2;  // less one, if these were as short as may be
            part_log2 = max(min(32 - __clz(units), max_units_log2_) - kPartsLog2, 0);
        }
        const int32_t units_log2 = kByWarps ? min(kPartsLog2, max_units_log2_) + part_log2 : max_units_log2_;
        int32_t unit = ((count - 1) >> units_log2) + 1;
        if (!kByWarps || count <= kMinUnit) unit = max(unit, kMinUnit);
        return {unit, max(((unit - 1) >> kPartsLog2) + 1, kMinLeaf), 1 << part_log2};
    }
    __device__ Cut cut(const Item& item) const { return cut(item.end - item.begin); }
    __device__ int32_t num_units(const Item& item) const {
        const int32_t count = item.end - item.begin;
        return cut(count).num_units(count);
    }

    // Whether one unit holds the item.
    __device__ static bool is_short(const Item& item) { return item.end - item.begin <= kMinUnit; }

    // The end of a unit next to block `block` of an item.
    __device__ int32_t round(int32_t block, const Item& item) const {
        const int32_t size = cut(item).unit;
        return min(item.begin + small_quotient(block - item.begin + size / 2, size) * size, item.end);
    }

  private:
    static constexpr int kPartsLog2 = floor_log2(Config::kWarps), kMinUnitLog2 = floor_log2(kMinUnit);

    int32_t max_units_log2_;
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
        int32_t num_runs = static_cast<int32_t>(min(static_cast<int64_t>(num_ctas), most(total)));
        if (count > 0 && items <= num_runs) num_runs = num_runs / items * items;
        if (cta >= num_runs) return;
        shares_ = Shares(total, num_runs);
        begin = round(schedule, units, shares_.begin(cta));
        end = cta + 1 == num_runs ? total : round(schedule, units, shares_.begin(cta + 1));
    }

    // Runs that so many blocks are shared out to at most.
    OCTAVO_HD static int64_t most(int64_t blocks) {
        return (blocks + Config::kMinBlocks - 1) / Config::kMinBlocks;
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

// What the warps of a CTA do at a time.
enum class StepKind : int32_t {
    leaves,  // of a unit
    units,   // of an item that CTAs share
    parts,   // of an item
    items,   // whole ones that follow each other
};

struct UnitStep {
    Item item;           // the first one
    int32_t begin, end;  // blocks
    int32_t share;       // of a warp: blocks, or an item
    StepKind kind;
};

// The steps of a CTA's run, and what one of its warps has of them.
template <class Config>
class UnitWalk {
  public:
    using Position = UnitStep;

    __device__ UnitWalk(const Schedule<Config::kThreads>& schedule, const Units<Config>& units,
                        const UnitRun<Config>& run, const Item& item)
        : schedule_(schedule), units_(units), end_(run.end) {
        first_ = step_at(item, run.begin);
    }

    __device__ const UnitStep& first() const { return first_; }

    // To the first step from this one on in which this warp has blocks; false if there is none.
    __device__ bool settle(UnitStep& step) const {
        do {
            const Segment own = segment(step);
            if (own.begin < own.end) return true;
        } while (advance(step));
        return false;
    }

    // To the step after this one; false if there is none.
    __device__ bool advance(UnitStep& step) const {
        if (step.end >= end_) return false;
        Item item = step.item;
        if (step.end >= item.end) item = schedule_.skip(item, step.kind == StepKind::items ? step.share : 1);
        step = step_at(item, step.end);
        return true;
    }

    // This warp's blocks.
    __device__ Segment segment(const UnitStep& step) const {
        const int warp = threadIdx.x / 32;
        Segment segment{step.item, step.end, step.end};
        if (step.kind != StepKind::items) {
            segment.begin = min(step.begin + warp * step.share, step.end);
            segment.end = min(segment.begin + step.share, step.end);
        } else if (warp < step.share) {
            segment.item = schedule_.skip(step.item, warp);
            segment.begin = segment.item.begin;
            segment.end = segment.item.end;
        }
        return segment;
    }

  private:
    __device__ UnitStep step_at(const Item& item, int32_t begin) const {
        if (begin == item.begin) {
            const int32_t items = items_at_once(item);
            if (items > 0) {
                return {item, begin, schedule_.skip(item, items - 1).end, items, StepKind::items};
            }
        }
        const auto cut = units_.cut(item);
        const int32_t unit = cut.unit, end = min(item.end, end_);
        const int32_t num_units = cut.num_units(end - begin);
        const bool whole = begin == item.begin && end == item.end;
        // Where an item of several units goes leaf by leaf, its sums wait in shared memory.
        constexpr bool kUnitAfterUnit = !Units<Config>::kByWarps || Units<Config>::kLeavesInRegisters;
        if (!Units<Config>::kByWarps || num_units == 1 ||
            (2 * num_units <= Config::kWarps && (kUnitAfterUnit || !whole))) {
            return {item, begin, min(begin + unit, end), cut.leaf, StepKind::leaves};
        }
        if (whole) {
            return {item, begin, end, unit * cut.part, StepKind::parts};
        }
        return {item, begin, min(begin + Config::kWarps * unit, end), unit, StepKind::units};
    }

    // As many items as there are warps at most, from this one on, if a warp each is a good share; or 0.
    __device__ int32_t items_at_once(const Item& item) const {
        if (units_.is_short(item)) {
            const int32_t items = short_items(item);
            return 2 * items >= Config::kWarps ? items : 0;
        }
        // Alike, in one sequence or in all, and of no parts, for which a warp has no place.
        const int32_t count = item.end - item.begin;
        if (!Units<Config>::kByWarps || units_.cut(count).part > 1) return 0;
        int32_t items = min(Config::kWarps, small_quotient(end_ - item.begin, count));
        if (schedule_.uniform_count() == 0) items = min(items, schedule_.num_kv_heads() - item.kv_head);
        return items + 1 >= Config::kWarps ? items : 0;
    }
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
    const Schedule<Config::kThreads>& schedule_;
    const Units<Config>& units_;
    UnitStep first_;
    int32_t end_;
};

}  // namespace octavo::cuda
