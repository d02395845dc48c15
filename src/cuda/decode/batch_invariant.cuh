// The decode kernel whose bits do not depend on the batch: the blocks, products and queues of kernel.cuh, cut
// and added up as units.cuh says.
//
// grid: one CTA an SM, which owns a run of units.
#pragma once

#include "cuda/decode/merge.cuh"
#include "cuda/decode/units.cuh"
#include "cuda/ptx/grid_dependency.h"

namespace octavo::cuda {

template <class Config>
struct BatchInvariantPlan {
    FastDivide group_size, page_size;
    Units<Config> units;
    // Units of items that several CTAs share: [gridDim.x, max_units, kRows] rows of kPartialRow floats.
    float* partial;
    uint32_t* counters;  // [gridDim.x, kRows], zero between launches: units of the item of that id
};

// A warp's way through its segments: copies run ahead of what is multiplied, over all ends.
template <class T, class Config>
class SegmentQueue {
  public:
    using Walk = UnitWalk<Config>;

    __device__ SegmentQueue(const WarpQueue<Config>& queue, Copier<T, Config, Walk>& copier,
                            const Schedule<Config::kThreads>& schedule, const Walk& walk)
        : queue_(queue), copier_(copier), copying_(copier.begin(schedule, walk)) {
        if (copying_) at_ = copier_.segment().begin;
#pragma unroll
        for (int i = 0; i < Config::kStages - 1; ++i) copy_next();
    }

    // Adds a segment's blocks to `state`.
    __device__ void add(ItemState<T, Config>& state, const Item& item, int32_t begin, int32_t end) {
        if (item.begin != item_begin_) {
            item_begin_ = item.begin;
            queries_ = queue_.next(queries_);
            state.begin(item, queue_.queries(queries_));
        }
        state.reset();
#pragma unroll 1
        for (int32_t block = begin; block < end; ++block) {
            copy_next();
            ptx::cp_async_wait<Config::kStages - 1>();
            __syncwarp();  // every lane's copies have arrived
            state.add(queue_.k(stage_), queue_.v(stage_), block - item.begin);
            __syncwarp();  // every lane is done with the block
        }
        state.sum_over_keys();
    }

  private:
    __device__ void copy_next() {
        bool new_item = copied_queries_ < 0;
        if (copying_ && at_ == copier_.segment().end) {
            const int32_t item_begin = copier_.segment().item.begin;
            copying_ = copier_.begin_next();
            at_ = copier_.segment().begin;
            new_item = item_begin != copier_.segment().item.begin;
        }
        if (copying_) {
            copier_.copy(queue_.k(stage_), queue_.v(stage_), at_ - copier_.segment().item.begin);
            ++at_;
            if (new_item) {
                copied_queries_ = queue_.next(copied_queries_);
                copier_.copy_queries(queue_.queries(copied_queries_));
            }
        }
        ptx::cp_async_commit();  // a group a block, empty past the end
        stage_ = queue_.next(stage_);
    }

    const WarpQueue<Config>& queue_;
    Copier<T, Config, Walk>& copier_;
    bool copying_;
    int32_t at_ = 0;  // the next block to copy
    int stage_ = 0, copied_queries_ = -1, queries_ = -1;
    int32_t item_begin_ = -1;  // of the item whose queries are in use
};

// Adds up units. A warp does so for its share of the rows, all warps together.
template <class T, class Config>
class UnitMerge {
  public:
    __device__ UnitMerge(const PartMerge<T, Config>& merge, const BatchInvariantPlan<Config>& plan,
                         const DecodeShared<Config>& shared, const UnitRun<Config>& run)
        : merge_(merge), plan_(plan), shared_(shared), run_(run) {}

    // A unit, of which the warps have left their pieces.
    __device__ void add(const UnitStep& step) {
        const Item& item = step.item;
        const int32_t begin = step.begin, end = step.end, unit_size = Config::kWarps * step.segment;
        const int32_t num_segments = min((end - begin - 1) / step.segment + 1, Config::kWarps);
        const bool whole = run_.holds(item);
#pragma unroll
        for (int i = 0; i < kOwnRows; ++i) {
            const int row = static_cast<int>(threadIdx.x / 32) + i * Config::kWarps;
            if (row >= merge_.num_rows()) break;
            Row unit;
            const int lane = threadIdx.x % 32;
            const DecodePiece<Config>& own = shared_.warps[lane % Config::kWarps].first;
            const FoldSteps<Config::kWarps> steps(unit.state, {own.max[row], own.sum[row]}, num_segments);
            for_each_column([&](int c, int column) {
                steps.add(unit.out[c], [&](int s) {
                    return *reinterpret_cast<const float4*>(&shared_.warps[s].first.out[row][column]);
                });
            });
            if (whole) {
                Row& all = rows_[i];
                if (begin == item.begin) {
                    all = unit;
                } else {
                    const FoldStep step = FoldStep::add(all.state, unit.state);
                    for_each_column([&](int c, int) { all.out[c] = step(all.out[c], unit.out[c]); });
                }
                if (end == item.end) store(item, row, all);
                continue;
            }
            const int32_t id = run_.id(item), index = (begin - item.begin) / unit_size;
            leave(partial_row(id, index, row), unit);
            if (end != item.end && end != run_.end) continue;
            __syncwarp();  // the row's partial results are written
            const int32_t first = max(run_.begin - item.begin, 0) / unit_size;
            const int32_t units = (item.end - item.begin - 1) / unit_size + 1;
            if (!arrive(id, row, index + 1 - first, units)) continue;
            if (item.begin < run_.begin) {
                from_before_.add(item, i);
            } else {
                goes_on_.add(item, i);
            }
        }
    }

    // After the last unit: adds up the items whose last units were this CTA's, in time.
    __device__ void finish() const {
#pragma unroll 1
        for (int i = 0; i < 2 * kOwnRows; ++i) {
            Finished finished = from_before_;
            if (i >= kOwnRows) finished = goes_on_;
            if (!(finished.rows >> i % kOwnRows & 1)) continue;
            merge(finished.item, static_cast<int>(threadIdx.x / 32) + i % kOwnRows * Config::kWarps);
        }
    }

  private:
    static constexpr int kOwnRows = Config::kRows / Config::kWarps;
    static constexpr int kColumns = PartMerge<T, Config>::kColumns;  // groups of four
    static constexpr int kColumnsOfLane = (kColumns + 31) / 32;

    // The columns of this lane; where there are fewer than lanes, some lanes repeat the last one.
    template <class Body>
    __device__ static void for_each_column(Body body) {
#pragma unroll
        for (int c = 0; c < kColumnsOfLane; ++c) {
            body(c, 4 * min(column_of(c), kColumns - 1));
        }
    }
    __device__ static int column_of(int c) { return static_cast<int>(threadIdx.x % 32) + 32 * c; }
    __device__ static bool has_column(int c) { return kColumns % 32 == 0 || column_of(c) < kColumns; }

    // An item, and the rows of which this CTA told of the last units.
    struct Finished {
        Item item;
        uint32_t rows = 0;

        __device__ void add(const Item& of, int i) {
            item = of;
            rows |= 1u << i;
        }
    };
    // Parts of a row that have been added up.
    struct Row {
        SoftmaxState state;
        float4 out[kColumnsOfLane];
    };

    __device__ void store(const Item& item, int row, const Row& result) const {
        for_each_column([&](int c, int column) {
            if (has_column(c)) merge_.store(item, row, column, result.state, result.out[c]);
        });
    }

    __device__ float* partial_row(int32_t id, int32_t unit, int row) const {
        return plan_.partial +
               ((id * plan_.units.max_units() + unit) * Config::kRows + row) * Config::kPartialRow;
    }

    __device__ static void leave(float* target, const Row& unit) {
        for_each_column([&](int c, int column) {
            if (!has_column(c)) return;
            *reinterpret_cast<float4*>(target + column) = unit.out[c];
            if (column == 0) {
                *reinterpret_cast<float2*>(target + Config::kHeadDim) =
                    make_float2(unit.state.max, unit.state.sum);
            }
        });
    }

    // Tells that `count` units are there; whether they were the last ones, which sets the counter to zero.
    __device__ bool arrive(int32_t id, int row, uint32_t count, uint32_t units) const {
        uint32_t arrived = 0;
        if (threadIdx.x % 32 == 0) {
            uint32_t* const counter = plan_.counters + id * Config::kRows + row;
            // Release: what this warp wrote; acquire: what the others did.
            asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], %2;"
                         : "=r"(arrived)
                         : "l"(counter), "r"(count)
                         : "memory");
            arrived += count;
            if (arrived == units) *counter = 0;
        }
        const bool is_last = __shfl_sync(~0u, arrived, 0) == units;
        __syncwarp();  // what lane 0 acquired, all lanes see
        return is_last;
    }

    // All units of an item that CTAs share, in their order, to its result.
    __device__ void merge(const Item& item, int row) const {
        const int32_t id = run_.id(item), units = plan_.units.num_units(item);
        const float* const own = partial_row(id, min(static_cast<int32_t>(threadIdx.x % 32), units - 1), row);
        const float2 state = __ldcg(reinterpret_cast<const float2*>(own + Config::kHeadDim));
        float4 parts[kMaxUnits];
        auto load = [&](int column) {
#pragma unroll
            for (int i = 0; i < kMaxUnits; ++i) {  // all under way together
                if (i < units)
                    parts[i] = __ldcg(reinterpret_cast<const float4*>(partial_row(id, i, row) + column));
            }
        };
        load(4 * min(column_of(0), kColumns - 1));
        Row result;
        const FoldSteps<kMaxUnits> steps(result.state, {state.x, state.y}, units);
        for_each_column([&](int c, int column) {
            if (c > 0) load(column);
            steps.add(result.out[c], [&](int i) { return parts[i]; });
        });
        store(item, row, result);
    }

    const PartMerge<T, Config>& merge_;
    const BatchInvariantPlan<Config>& plan_;
    const DecodeShared<Config>& shared_;
    const UnitRun<Config>& run_;
    Row rows_[kOwnRows];              // of the item under way, if the CTA has all of it
    Finished from_before_, goes_on_;  // of the items that the ends of the run cut
};

template <class T, int kHeadDim, int kRowTiles>
__global__ void __launch_bounds__(DecodeConfig<kHeadDim, kRowTiles>::kThreads, 1)
    batch_invariant_decode_kernel(
        const __grid_constant__ ForwardParams p,
        const __grid_constant__ BatchInvariantPlan<DecodeConfig<kHeadDim, kRowTiles>> plan) {
    using Config = DecodeConfig<kHeadDim, kRowTiles>;
    extern __shared__ __align__(128) unsigned char shared_bytes[];
    auto& shared = *reinterpret_cast<DecodeShared<Config>*>(shared_bytes);
    const int warp = threadIdx.x / 32;

    const Units<Config> units = plan.units;
    const WarpQueue<Config> queue(shared.warps[warp]);
    Copier<T, Config, UnitWalk<Config>> copier(p, plan.page_size, plan.group_size);

    ptx::let_next_grid_start();
    ptx::wait_for_previous_grid();
    const Schedule<Config::kThreads> schedule(p, shared.schedule);
    const UnitRun<Config> run(schedule, units);
    if (run.begin == run.end) return;
    ItemState<T, Config> state(p, plan.group_size, schedule);

    const Item first = schedule.find(run.begin);
    const UnitWalk<Config> walk(schedule, units, run, first);
    SegmentQueue<T, Config> segments(queue, copier, schedule, walk);
    const PartMerge<T, Config> part_merge(p, plan.group_size, schedule);
    UnitMerge<T, Config> merge(part_merge, plan, shared, run);
    UnitStep step = walk.first_step();
    DecodePiece<Config>& piece = shared.warps[warp].first;
    bool pieces_in_use = false;  // by other warps, for the unit before
    do {
        const Segment own = walk.segment(step);
        const bool alone = step.num_items > 0;
        if (alone && pieces_in_use) {
            __syncthreads();
            pieces_in_use = false;
        }
        const int32_t size = alone ? units.segment_size(own.item) : step.segment;
#pragma unroll 1
        for (int32_t at = own.begin; at < own.end; at += size) {
            segments.add(state, own.item, at, min(at + size, own.end));
            if (!alone) break;
            if (at > own.begin) state.add_to(piece);
            __syncwarp();  // the piece has been read
            if (at + size < own.end) {
                state.leave(piece);
                __syncwarp();
            } else {
                state.store();
            }
        }
        if (alone) continue;
        __syncthreads();  // the pieces of the unit before have been read
        if (own.begin < own.end) state.leave(piece);
        __syncthreads();  // all pieces are there
        merge.add(step);
        pieces_in_use = true;
    } while (walk.advance(step));
    merge.finish();
}

}  // namespace octavo::cuda
