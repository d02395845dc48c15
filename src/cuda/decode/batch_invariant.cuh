// The decode kernel whose bits do not depend on the batch: the blocks, products and queues of kernel.cuh, cut
// and added up as units.cuh says.
//
// grid: one CTA an SM, which owns a run of units.
#pragma once

#include "cuda/decode/merge.cuh"
#include "cuda/decode/parameters.cuh"
#include "cuda/decode/units.cuh"
#include "cuda/ptx/grid_dependency.h"

namespace octavo::cuda {

template <class Config>
struct BatchInvariantPlan {
    FastDivide group_size, page_size;
    Units<Config> units;
    int32_t num_rows, max_units;  // of an item, at most
    // Units of items that several CTAs share: [gridDim.x, max_units, num_rows] rows of kPartialRow floats.
    float* partial;
    uint32_t* counters;  // [gridDim.x, num_rows], zero between launches: units of the item of that id
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

template <class Config>
struct BatchInvariantShared : DecodeShared<Config> {
    // Where leaves fit in registers, or warps take nothing else: sums of the units of an item before the one
    // under way. Otherwise each warp's sums of leaves.
    union {
        alignas(16) float rows[Config::kRows][Config::kPartialRow];
        DecodePiece<Config>
            of_units[Units<Config>::kByWarps && !Units<Config>::kLeavesInRegisters ? Config::kWarps : 1];
    };
};

// Where a warp's leaves wait for others of their unit: in `kept`, in registers, or in shared memory.
template <class Config, class Kept>
__device__ __forceinline__ auto& sums_of_leaves(Kept& kept, BatchInvariantShared<Config>& shared, int warp) {
    if constexpr (Units<Config>::kLeavesInRegisters) {
        return kept;
    } else if constexpr (Units<Config>::kByWarps) {
        return shared.of_units[warp];
    } else {
        return shared.warps[warp].first;
    }
}

// Adds up what the warps of a CTA leave. A warp does so for its share of the rows, all warps together.
template <class T, class Config>
class UnitMerge {
  public:
    __device__ UnitMerge(const PartMerge<T, Config>& merge, const BatchInvariantPlan<Config>& plan,
                         BatchInvariantShared<Config>& shared, const UnitRun<Config>& run)
        : merge_(merge), plan_(plan), shared_(shared), run_(run) {}

    // This warp's piece is a unit of an item that CTAs share, the one that begins with block `begin`.
    __device__ void leave_unit(const Item& item, int32_t begin) const {
        const int32_t id = run_.id(item);
        const int32_t index = small_quotient(begin - item.begin, plan_.units.cut(item).unit);
#pragma unroll 2
        for (int row = 0; row < plan_.num_rows; ++row) {
            leave(partial_row(id, index, row), piece(row, threadIdx.x / 32));
        }
    }

    // A step of which the warps have left their pieces, or their units.
    __device__ void add(const UnitStep& step) {
        const Item& item = step.item;
        const int32_t pieces = small_quotient(step.end - step.begin - 1, step.share) + 1;
        const bool whole = run_.holds(item);
#pragma unroll 1
        for (int i = 0; i < kOwnRows; ++i) {
            const int row = static_cast<int>(threadIdx.x / 32) + i * Config::kWarps;
            if (row >= plan_.num_rows) break;
            if (whole) {
                Row sum = sum_pieces(row, pieces);
                float* const before = shared_.rows[row];  // what there is of an item of few units
                if (step.begin > item.begin) {
                    Row all = row_at(before);
                    all.add(sum);
                    sum = all;
                    __syncwarp();  // it has been read
                }
                if (step.end == item.end) {
                    store(item, row, sum);
                } else {
                    leave(before, sum);
                    __syncwarp();
                }
                continue;
            }
            const int32_t unit_size = plan_.units.cut(item).unit, id = run_.id(item);
            if (step.kind == StepKind::leaves) {
                leave(partial_row(id, small_quotient(step.begin - item.begin, unit_size), row),
                      sum_pieces(row, pieces));
            }
            if (step.end != item.end && step.end != run_.end) continue;
            __syncwarp();  // the row's partial results are written
            const int32_t begin = max(run_.begin - item.begin, 0), end = step.end - item.begin;
            const int32_t units = small_quotient(end - begin - 1, unit_size) + 1;
            if (!arrive(id, row, units, plan_.units.num_units(item))) continue;
            (item.begin < run_.begin ? from_before_ : goes_on_) |= 1u << i;
        }
    }

    // After the last step: adds up the items at the ends of the run whose last units were this CTA's, in
    // time.
    __device__ void finish(const Schedule<Config::kThreads>& schedule, const Item& last) {
        Item first{};
        if (from_before_) first = schedule.find(run_.begin);
#pragma unroll 1
        for (int i = 0; i < kOwnRows; ++i) {
            const int row = static_cast<int>(threadIdx.x / 32) + i * Config::kWarps;
            if (from_before_ >> i & 1) merge(first, row);
            if (goes_on_ >> i & 1) merge(last, row);
        }
    }

  private:
    using Row = RowSum<Config>;
    static constexpr int kOwnRows = Config::kRows / Config::kWarps;

    // What a warp has left of a row.
    __device__ Row piece(int row, int warp) const {
        const DecodePiece<Config>& piece = shared_.warps[warp].first;
        Row sum;
        sum.state = {piece.max[row], piece.sum[row]};
        Row::for_each_column([&](int c, int column) {
            sum.out[c] = *reinterpret_cast<const float4*>(&piece.out[row][column]);
        });
        return sum;
    }
    __device__ Row sum_pieces(int row, int count) const {
        return fold<Config>(count, count, [&](int i) { return piece(row, i); });
    }

    __device__ void store(const Item& item, int row, const Row& sum) const {
        Row::for_each_column([&](int c, int column) {
            if (Row::owns(c)) merge_.store(item, row, column, sum.state, sum.out[c]);
        });
    }

    __device__ float* partial_row(int32_t id, int32_t unit, int row) const {
        return plan_.partial + ((id * plan_.max_units + unit) * plan_.num_rows + row) * Config::kPartialRow;
    }

    __device__ static Row row_at(const float* source) {
        Row sum;
        sum.state = {source[Config::kHeadDim], source[Config::kHeadDim + 1]};
        Row::for_each_column(
            [&](int c, int column) { sum.out[c] = *reinterpret_cast<const float4*>(source + column); });
        return sum;
    }
    __device__ static void leave(float* target, const Row& unit) {
        Row::for_each_column([&](int c, int column) {
            if (!Row::owns(c)) return;
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
            uint32_t* const counter = plan_.counters + id * plan_.num_rows + row;
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

    // All units of an item that CTAs share to its result, by way of the place where this warp's blocks were.
    __device__ void merge(const Item& item, int row) {
        constexpr int kRowBytes = sizeof(float) * Config::kPartialRow, kChunks = kRowBytes / 16;
        // Others may still read this warp's piece.
        static_assert(kMaxUnits * kRowBytes <= offsetof(typename DecodeShared<Config>::Warp, first));
        const auto cut = plan_.units.cut(item);
        const int32_t id = run_.id(item), units = cut.num_units(item.end - item.begin);
        auto& own = shared_.warps[threadIdx.x / 32];
        const float* const rows = reinterpret_cast<const float*>(&own);
        __syncwarp();  // the rows merged before have been read
#pragma unroll 4
        for (int i = 0; i < units; ++i) {
            for (int c = threadIdx.x % 32; c < kChunks; c += 32) {
                ptx::cp_async_16(ptx::shared_address(&own) + i * kRowBytes + 16 * c,
                                 partial_row(id, i, row) + 4 * c, true);
            }
        }
        ptx::cp_async_commit();
        ptx::cp_async_wait<0>();
        __syncwarp();  // every lane's copies have arrived
        const Row sum =
            fold<Config>(units, cut.part, [&](int i) { return row_at(rows + i * Config::kPartialRow); });
        store(item, row, sum);
    }

    const PartMerge<T, Config>& merge_;
    const BatchInvariantPlan<Config>& plan_;
    BatchInvariantShared<Config>& shared_;
    const UnitRun<Config>& run_;
    // Of the items that the ends of the run cut: the rows of which this CTA told of the last units.
    uint32_t from_before_ = 0, goes_on_ = 0;
};

template <class T, int kHeadDim, int kRowTiles>
__global__ void __launch_bounds__(DecodeConfig<kHeadDim, kRowTiles>::kThreads, 1)
    batch_invariant_decode_kernel(
        const __grid_constant__ ForwardParams p,
        const __grid_constant__ BatchInvariantPlan<DecodeConfig<kHeadDim, kRowTiles>> plan) {
    using Config = DecodeConfig<kHeadDim, kRowTiles>;
    extern __shared__ __align__(128) unsigned char shared_bytes[];
    auto& shared = *reinterpret_cast<BatchInvariantShared<Config>*>(shared_bytes);
    const int warp = threadIdx.x / 32;

    constexpr bool kByWarps = Units<Config>::kByWarps;
    touch_parameters(p);
    const Units<Config> units = plan.units;
    const WarpQueue<Config> queue(shared.warps[warp]);
    Copier<T, Config, UnitWalk<Config>> copier(p, plan.page_size, plan.group_size);

    ptx::let_next_grid_start();
    ptx::wait_for_previous_grid();
    touch_page_table(p, plan.page_size);
    const Schedule<Config::kThreads> schedule(p, shared.schedule);
    const UnitRun<Config> run(schedule, units);
    if (run.begin == run.end) return;
    ItemState<T, Config> state(p, plan.group_size, schedule);

    const UnitWalk<Config> walk(schedule, units, run, schedule.find(run.begin));
    SegmentQueue<T, Config> segments(queue, copier, schedule, walk);
    const PartMerge<T, Config> part_merge(p, plan.group_size, schedule);
    UnitMerge<T, Config> merge(part_merge, plan, shared, run);
    UnitStep step = walk.first();
    DecodePiece<Config>& piece = shared.warps[warp].first;
    typename ItemState<T, Config>::Kept kept;
    auto& of_unit = sums_of_leaves(kept, shared, warp);
    bool pieces_in_use = false;  // by other warps, for the step before
    do {
        const Segment own = walk.segment(step);
        const auto cut = units.cut(own.item);
        if (pieces_in_use && step.kind >= StepKind::parts) {
            __syncthreads();  // the pieces of the step before have been read
            pieces_in_use = false;
        }
        int32_t unit_begin = own.begin;
#pragma unroll 1
        for (int32_t at = own.begin; at < own.end;) {
            const int32_t unit_end = min(unit_begin + cut.unit, own.end), leaf = at;
            at = min(at + cut.leaf, unit_end);
            segments.add(state, own.item, leaf, at);
            if (leaf > unit_begin) state.add_to(of_unit);
            const bool is_last = at == own.end, unit_ends = at == unit_end;
            if (kByWarps && unit_ends) {
                if (unit_begin > own.begin) state.add_to(piece);  // units that have been added up
                unit_begin = at;
            }
            if (is_last) break;
            __syncwarp();  // all lanes have read what was left before
            if (kByWarps && unit_ends) {
                state.leave(piece);
            } else {
                state.leave(of_unit);
            }
            __syncwarp();
        }
        if (step.kind == StepKind::items) {
            if (own.begin < own.end) state.store();
            continue;
        }
        if (pieces_in_use) __syncthreads();  // as above
        __syncwarp();                        // all lanes have read its piece
        if (own.begin < own.end) {
            state.leave(piece);
            if (step.kind == StepKind::units) {
                __syncwarp();
                merge.leave_unit(own.item, own.begin);
            }
        }
        __syncthreads();  // all pieces, or units, are there
        merge.add(step);
        pieces_in_use = true;
    } while (walk.advance(step));
    merge.finish(schedule, step.item);
}

}  // namespace octavo::cuda
