// Work cut in places that follow from a sequence alone, so that its bits do not depend on its batch.
//
// An item is cut into units, as many as a power of two says, and a unit into leaves, likewise: of all leaves
// the j-th one begins with block j * blocks / leaves, so that they differ by a block at most. Units that
// follow each other make a part, of which an item has no more than a CTA has warps. Results add up from the
// left on each of these levels. Who computes them does not matter: the warps of a CTA take a leaf each, or a
// unit, or a part, or a whole item.
#pragma once

#include "cuda/decode/runs.cuh"
#include "cuda/decode/segments.cuh"

namespace octavo::cuda {

// Long items have so many units that one sequence fills the device, if its heads allow.
constexpr int kMaxUnits = 32, kMaxUnitsOfSequence = 128;

OCTAVO_HD constexpr int32_t floor_log2(int32_t x) { return x < 2 ? 0 : 1 + floor_log2(x / 2); }

// How an item of `count` blocks is cut.
struct UnitCut {
    int32_t count, size;                         // blocks: the item's; those that leaves are shares of
    int32_t units_log2, leaves_log2, part_log2;  // units of the item, leaves of a unit, units of a part
    int32_t all_leaves;                          // that are not empty

    __device__ int32_t num_units() const { return 1 << units_log2; }
    __device__ int32_t num_leaves() const { return min(1 << leaves_log2, all_leaves); }  // of a unit
    __device__ int32_t unit_begin(int32_t unit) const { return begin(unit, units_log2); }
    // Leaf `leaf` of all; the same as that of its unit, if it is the first one.
    __device__ int32_t leaf_begin(int32_t leaf) const { return begin(leaf, units_log2 + leaves_log2); }

    // Leaf `i` of a unit; those that there are not begin where the unit ends.
    __device__ int32_t leaf_of(int32_t unit, int32_t i) const {
        return leaf_begin((unit << leaves_log2) + min(i, 1 << leaves_log2));
    }

    // The unit that begins with a block, or the one that begins next to it.
    __device__ int32_t unit_at(int32_t begin) const { return scaled(begin, 0.75f); }
    __device__ int32_t unit_near(int32_t block) const { return scaled(block, 0.5f); }

  private:
    __device__ int32_t begin(int32_t i, int32_t log2) const {
        return min(static_cast<int32_t>(static_cast<uint64_t>(i) * size >> log2), count);
    }
    // Units begin less than half of one before where equal shares would.
    __device__ int32_t scaled(int32_t block, float more) const {
        return static_cast<int32_t>(
            __fdividef(static_cast<float>(block) * static_cast<float>(1 << units_log2),
                       static_cast<float>(count)) +
            more);
    }
};

template <class Config>
class Units {
  public:
    // Whether warps take units, parts and items of several units. With more dims a lane has no room for what
    // has been added up beside what is under way.
    static constexpr bool kByWarps = Config::kHeadDim <= 128;
    // Whether it has room for leaves that have been added up; otherwise a second piece in shared memory has.
    static constexpr bool kLeavesInRegisters = Config::kRowTiles == 1 && kByWarps;

    // An item of so many blocks is short. Up to a few units have as many at least, more of them twice as
    // many.
    static constexpr int kShort = 16, kLeast = 2 * kShort;

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
        constexpr int64_t kMany = int64_t{kMaxUnits} * kLeast;
        const int32_t count = static_cast<int32_t>(std::min(blocks, kMany));
        return 1 << units_log2(count, floor_log2(count));
    }

    __device__ UnitCut cut(int32_t count) const {
        const int32_t size = max(count, Config::kWarps * kMinLeaf), size_log2 = 31 - __clz(size);
        const int32_t units = units_log2(count, size_log2);
        return {count,
                size,
                units,
                kWarpsLog2,
                kByWarps ? max(units - kWarpsLog2, 0) : 0,
                count < size ? (count + kMinLeaf - 1) >> kMinLeafLog2 : 1 << (units + kWarpsLog2)};
    }
    __device__ UnitCut cut(const Item& item) const { return cut(item.end - item.begin); }

    // Whether the item is so short that a warp may take it whole, beside others.
    __device__ static bool is_short(const Item& item) { return item.end - item.begin <= kShort; }

    // The end of a unit next to block `block` of an item.
    __device__ int32_t round(int32_t block, const Item& item) const {
        const UnitCut cut = this->cut(item);
        return item.begin + cut.unit_begin(cut.unit_near(block - item.begin));
    }

  private:
    // Blocks of a leaf, at least: what it leaves is small beside its keys and values.
    static constexpr int kMinLeafLog2 = Config::kWarps == 8 ? 0 : 2, kMinLeaf = 1 << kMinLeafLog2;
    static constexpr int kWarpsLog2 = floor_log2(Config::kWarps), kFewLog2 = kByWarps ? 2 : 0;

    __host__ __device__ int32_t units_log2(int32_t count, int32_t count_log2) const {
        if (count <= kShort) return 0;
        const int32_t few = min(count_log2 - floor_log2(kShort), kFewLog2);
        return min(max(few, count_log2 - floor_log2(kLeast)), max_units_log2_);
    }

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
    Item item;            // the first one
    int32_t first, last;  // its units, up to the last one; or how many items
    int32_t end;          // block
    StepKind kind;
};

// What a warp has of a step.
struct UnitShare : Segment {
    int32_t first, last;  // leaves of the item, up to the last one
};

// A step, and what a warp has of it.
struct UnitPlace {
    UnitStep step;
    UnitShare share;
};

// The steps of a CTA's run, and what one of its warps has of them.
template <class Config>
class UnitWalk {
  public:
    __device__ UnitWalk(const Schedule<Config::kThreads>& schedule, const Units<Config>& units,
                        const UnitRun<Config>& run, const Item& item)
        : schedule_(schedule), units_(units), begin_(run.begin), end_(run.end) {
        first_ = item;
    }

    // In shared memory: to the step after this one, or to the first one; false if there is none. All lanes
    // together. One place in the code for all who walk, since what is inlined does not fit the instruction
    // cache: a step took 2 us (H200).
    __noinline__ __device__ static bool advance(const UnitWalk& walk, UnitPlace& place, bool begins) {
        UnitStep step = place.step;
        Item item = walk.first_;
        int32_t first = 0;
        if (begins) {
            first = walk.units_.cut(item).unit_at(walk.begin_ - item.begin);
        } else {
            if (step.end >= walk.end_) return false;
            item = step.item;
            if (step.end < item.end) {
                first = step.last;
            } else {
                item = walk.schedule_.skip(item, step.kind == StepKind::items ? step.last : 1);
            }
        }
        step = walk.step_at(item, first);
        const UnitShare share = walk.share(step);
        __syncwarp();  // all lanes have read the place
        if (threadIdx.x % 32 == 0) place = {step, share};
        __syncwarp();
        return true;
    }

    // The warp that has leaf `leaf` of a unit: in turn, since some leaves have a block more.
    __device__ static int warp_of(const UnitStep& step, int leaf) {
        return (leaf + step.first) % Config::kWarps;
    }

  private:
    __device__ UnitShare share(const UnitStep& step) const {
        const int32_t warp = threadIdx.x / 32;
        Item item = step.item;
        if (step.kind == StepKind::items) {
            if (warp >= step.last) return {{item, step.end, step.end}, 0, 0};
            item = schedule_.skip(item, warp);
        }
        const UnitCut cut = units_.cut(item);
        int32_t first = 0, last = cut.all_leaves;
        if (step.kind == StepKind::leaves) {
            const int32_t leaf = (warp - step.first) & (Config::kWarps - 1);
            first = (step.first << cut.leaves_log2) + min(leaf, cut.num_leaves());
            last = (step.first << cut.leaves_log2) + min(leaf + 1, cut.num_leaves());
        } else if (step.kind != StepKind::items) {
            const int32_t log2 = step.kind == StepKind::parts ? cut.part_log2 : 0;
            first = min(step.first + (warp << log2), step.last) << cut.leaves_log2;
            last = min(step.first + ((warp + 1) << log2), step.last) << cut.leaves_log2;
        }
        return {{item, item.begin + cut.leaf_begin(first), item.begin + cut.leaf_begin(last)}, first, last};
    }

    __device__ UnitStep step_at(const Item& item, int32_t first) const {
        if (first == 0) {
            const int32_t items = items_at_once(item);
            if (items > 0) return {item, 0, items, schedule_.skip(item, items - 1).end, StepKind::items};
        }
        const UnitCut cut = units_.cut(item);
        const int32_t last = item.end <= end_ ? cut.num_units() : cut.unit_at(end_ - item.begin);
        const int32_t units = last - first;
        const bool whole = item.begin >= begin_ && item.end <= end_;
        auto step = [&](int32_t until, StepKind kind) {
            return UnitStep{item, first, until, item.begin + cut.unit_begin(until), kind};
        };
        if (!Units<Config>::kByWarps || units == 1) return step(first + 1, StepKind::leaves);
        if (whole) {
            // Where an item of several units goes leaf by leaf, its sums wait in shared memory.
            const bool by_leaves = Units<Config>::kLeavesInRegisters && 2 * units <= Config::kWarps;
            return by_leaves ? step(first + 1, StepKind::leaves) : step(last, StepKind::parts);
        }
        // A unit each leaves some warps idle, but five of eight draw less than an SM's share.
        return 4 * units >= 3 * Config::kWarps ? step(min(first + Config::kWarps, last), StepKind::units)
                                               : step(first + 1, StepKind::leaves);
    }

    // As many items as there are warps at most, from this one on, if a warp each is a good share; or 0.
    __device__ int32_t items_at_once(const Item& item) const {
        if (units_.is_short(item)) {
            const int32_t items = short_items(item);
            return 2 * items >= Config::kWarps ? items : 0;
        }
        // Alike, in one sequence or in all, and of no parts, for which a warp has no place.
        const int32_t count = item.end - item.begin;
        if (!Units<Config>::kByWarps || units_.cut(count).part_log2 > 0) return 0;
        int32_t items = min(Config::kWarps, quotient_by_floats(end_ - item.begin, count));
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

    Schedule<Config::kThreads> schedule_;
    Units<Config> units_;
    Item first_;
    int32_t begin_, end_;
};

}  // namespace octavo::cuda
