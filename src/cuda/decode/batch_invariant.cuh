// The decode kernel whose bits do not depend on the batch, for windows, prefixes and room for very many
// units: the blocks, products and queues of kernel.cuh, cut and added up as units.cuh says. All other calls
// have a CTA for each unit (dealt.cuh), with the same bits.
//
// grid: one CTA an SM, which owns a run of units.
#pragma once

#include "cuda/decode/parameters.cuh"
#include "cuda/decode/split_kv_combine.cuh"
#include "cuda/decode/units.cuh"
#include "cuda/ptx/grid_dependency.h"

#include <new>

namespace octavo::cuda {

template <class Config>
struct BatchInvariantPlan {
    FastDivide group_size, page_size;
    Units<Config> units;
    int32_t num_rows, max_units;  // of an item, at most
    // Units of items that several CTAs share: [runs, max_units, num_rows] rows of kWarpPartialRow words, zero
    // between launches.
    uint32_t* pushed;
};

// For the copies: a warp's segments, one step after the other.
template <class Config>
class SegmentWalk {
  public:
    using Position = UnitPlace*;

    __device__ SegmentWalk(const UnitWalk<Config>& walk, UnitPlace& place) : walk_(walk), place_(&place) {}

    __device__ UnitPlace* first() const { return place_; }
    __device__ bool advance(UnitPlace* place) const {
        return UnitWalk<Config>::advance(walk_, *place, false);
    }
    // To the first step from this one on in which this warp has blocks; false if there is none.
    __device__ bool settle(UnitPlace* place) const {
        while (place->share.begin >= place->share.end) {
            if (!advance(place)) return false;
        }
        return true;
    }
    __device__ Segment segment(const UnitPlace* place) const { return place->share; }

  private:
    const UnitWalk<Config>& walk_;
    UnitPlace* place_;
};

// A warp's way through its segments: copies run ahead of what is multiplied, over all ends.
template <class T, class Config>
class SegmentQueue {
  public:
    using Walk = SegmentWalk<Config>;
    using State = WarpAttention<T, Config, Schedule<Config::kThreads>, true>;

    __device__ SegmentQueue(const WarpQueue<Config>& queue, Copier<T, Config, Walk>& copier,
                            const Schedule<Config::kThreads>& schedule, const Walk& walk)
        : queue_(queue), copier_(copier), copying_(copier.begin(schedule, walk)) {
        if (copying_) at_ = copier_.segment().begin;
    }

    // Adds a segment's blocks to `state`.
    __device__ void add(State& state, const Item& item, int32_t begin, int32_t end) {
        if (item.begin != item_begin_) {
            item_begin_ = item.begin;
            queries_ = queue_.next(queries_);
            state.begin(item, queue_.queries(queries_));
        }
        state.reset();
#pragma unroll 1
        for (int32_t block = begin; block < end;) {
            copy_next();
            if (ahead_ < Config::kStages - 1) {
                ++ahead_;
                continue;
            }
            ptx::cp_async_wait<Config::kStages - 1>();
            __syncwarp();  // every lane's copies have arrived
            state.add(queue_.k(stage_), queue_.v(stage_), block - item.begin);
            __syncwarp();  // every lane is done with the block
            ++block;
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
    int ahead_ = 0;   // blocks copied, up to as many as there are to be on their way
    int32_t at_ = 0;  // the next block to copy
    int stage_ = 0, copied_queries_ = -1, queries_ = -1;
    int32_t item_begin_ = -1;  // of the item whose queries are in use
};

template <class Config>
struct BatchInvariantShared : StreamKShared<Config> {
    // Where leaves fit in registers, or warps take nothing else: sums of the units of an item before the one
    // under way. Otherwise each warp's sums of leaves.
    union {
        alignas(16) float rows[Config::kRows][Config::kWarpPartialRow];
        WarpPartial<Config>
            of_units[Units<Config>::kByWarps && !Units<Config>::kLeavesInRegisters ? Config::kWarps : 1];
    };
    struct {
        alignas(UnitWalk<Config>) unsigned char walk[sizeof(UnitWalk<Config>)];
        UnitPlace copied, used;  // where copies are, and what is multiplied
    } walks[Config::kWarps];
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

// Rows of units that several CTAs share, in memory that is zero between launches. What is there never is
// (dealt_merge.cuh): no fence, no counter.
template <class Config>
struct PushedRow {
    using Row = RowSum<Config>;
    uint32_t* words;

    __device__ void push(const Row& sum) const {
        Row::for_each_column([&](int c, int column) {
            if (!Row::owns(c)) return;
            const float4 out = sum.out[c];
            ptx::store_relaxed_16(words + column, make_uint4(__float_as_uint(out.x), __float_as_uint(out.y),
                                                             __float_as_uint(out.z), NonZero::encode(out.w)));
        });
        if (threadIdx.x % 32 == 0) {
            ptx::store_relaxed_8(words + Config::kHeadDim,
                                 make_uint2(NonZero::encode(sum.state.max), NonZero::encode(sum.state.sum)));
        }
    }
    // Whether all that this lane looks at has come.
    __device__ bool take(Row& sum) const {
        const uint2 state = ptx::load_relaxed_8(words + Config::kHeadDim);
        bool there = state.x != 0 && state.y != 0;
        sum.state = {NonZero::decode(state.x), NonZero::decode(state.y)};
        Row::for_each_column([&](int c, int column) {
            const uint4 out = ptx::load_relaxed_16(words + column);
            there = there && out.w != 0;
            sum.out[c] = make_float4(__uint_as_float(out.x), __uint_as_float(out.y), __uint_as_float(out.z),
                                     NonZero::decode(out.w));
        });
        return there;
    }
    // As the next launch wants it, once all lanes have taken it.
    __device__ void clear() const {
        Row::for_each_column([&](int c, int column) {
            if (Row::owns(c)) *reinterpret_cast<uint4*>(words + column) = make_uint4(0, 0, 0, 0);
        });
        if (threadIdx.x % 32 == 0) *reinterpret_cast<uint2*>(words + Config::kHeadDim) = make_uint2(0, 0);
    }
};

// Adds up what the warps of a CTA leave. A warp does so for its share of the rows, all warps together.
template <class T, class Config>
class UnitMerge {
  public:
    __device__ UnitMerge(const OutputWriter<T, Config>& merge, const BatchInvariantPlan<Config>& plan,
                         BatchInvariantShared<Config>& shared, const UnitRun<Config>& run)
        : merge_(merge), plan_(plan), shared_(shared), run_(run) {}

    // This warp's piece is unit `unit` of an item that CTAs share.
    __device__ void push_unit(const Item& item, int32_t unit) const {
        const int32_t id = run_.id(item);
#pragma unroll 2
        for (int row = 0; row < plan_.num_rows; ++row) {
            pushed(id, unit, row).push(piece(row, threadIdx.x / 32));
        }
    }

    // A step of leaves or parts, of which the warps have left their pieces.
    __device__ void add(const UnitStep& step) const {
        const Item& item = step.item;
        const UnitCut cut = plan_.units.cut(item);
        const bool leaves = step.kind == StepKind::leaves, whole = run_.holds(item);
        const int32_t pieces = leaves ? cut.num_leaves() : ((step.last - 1) >> cut.part_log2) + 1;
#pragma unroll 1
        for (int row = threadIdx.x / 32; row < plan_.num_rows; row += Config::kWarps) {
            Row sum = fold<Config>(
                pieces, [&](int i) { return piece(row, leaves ? UnitWalk<Config>::warp_of(step, i) : i); });
            if (!whole) {
                pushed(run_.id(item), step.first, row).push(sum);
                continue;
            }
            float* const before = shared_.rows[row];  // what there is of an item of few units
            if (step.first > 0) {
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
        }
    }

    // After the last step: waits for the units of the item that ends in this run, if it began in one before,
    // and adds them up. CTAs start in order, so that those before are under way.
    __device__ void finish(const Schedule<Config::kThreads>& schedule) const {
        const Item item = schedule.find(run_.begin);
        if (item.begin == run_.begin || item.end > run_.end) return;
        constexpr int kAtOnce = 8;  // units whose loads are under way together
        const UnitCut cut = plan_.units.cut(item);
        const int32_t id = run_.id(item), units = cut.num_units();
#pragma unroll 1
        for (int row = threadIdx.x / 32; row < plan_.num_rows; row += Config::kWarps) {
            UnitFold<Config> fold(cut.part_log2);
#pragma unroll 1
            for (int32_t first = 0; first < units; first += kAtOnce) {
                Row sums[kAtOnce];
                bool all_there;
                do {
                    all_there = true;
#pragma unroll
                    for (int i = 0; i < kAtOnce; ++i) {
                        if (first + i < units) {
                            all_there = pushed(id, first + i, row).take(sums[i]) && all_there;
                        }
                    }
                } while (!__all_sync(~0u, all_there));
#pragma unroll
                for (int i = 0; i < kAtOnce; ++i) {
                    if (first + i >= units) continue;
                    pushed(id, first + i, row).clear();
                    fold.add(first + i, sums[i]);
                }
            }
            store(item, row, fold.sum());
        }
    }

  private:
    using Row = RowSum<Config>;

    // What a warp has left of a row.
    __device__ Row piece(int row, int warp) const {
        const WarpPartial<Config>& piece = shared_.warps[warp].first;
        Row sum;
        sum.state = {piece.max[row], piece.sum[row]};
        Row::for_each_column([&](int c, int column) {
            sum.out[c] = *reinterpret_cast<const float4*>(&piece.out[row][column]);
        });
        return sum;
    }

    __device__ void store(const Item& item, int row, const Row& sum) const {
        Row::for_each_column([&](int c, int column) {
            if (Row::owns(c)) merge_.store(item, row, column, sum.state, sum.out[c]);
        });
    }

    __device__ PushedRow<Config> pushed(int32_t id, int32_t unit, int row) const {
        return {plan_.pushed +
                ((id * plan_.max_units + unit) * plan_.num_rows + row) * Config::kWarpPartialRow};
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

    const OutputWriter<T, Config>& merge_;
    const BatchInvariantPlan<Config>& plan_;
    BatchInvariantShared<Config>& shared_;
    const UnitRun<Config>& run_;
};

template <class T, int kHeadDim, int kRowTiles>
__global__ void __launch_bounds__(DecodeConfig<kHeadDim, kRowTiles>::kThreads, 1)
    batch_invariant_decode_kernel(
        const __grid_constant__ AttentionParams p,
        const __grid_constant__ BatchInvariantPlan<DecodeConfig<kHeadDim, kRowTiles>> plan) {
    using Config = DecodeConfig<kHeadDim, kRowTiles>;
    extern __shared__ __align__(128) unsigned char shared_bytes[];
    auto& shared = *reinterpret_cast<BatchInvariantShared<Config>*>(shared_bytes);
    const int warp = threadIdx.x / 32;

    constexpr bool kByWarps = Units<Config>::kByWarps;
    prefetch_params(p);
    const Units<Config> units = plan.units;
    const WarpQueue<Config> queue(shared.warps[warp]);
    Copier<T, Config, SegmentWalk<Config>> copier(p, plan.page_size, plan.group_size);

    ptx::launch_dependents();
    ptx::wait_for_previous_grid();
    prefetch_page_table(p, plan.page_size);
    const Schedule<Config::kThreads> schedule(p, shared.schedule);
    const UnitRun<Config> run(schedule, units);
    if (run.begin == run.end) return;
    typename SegmentQueue<T, Config>::State state(p, plan.group_size, schedule);

    auto& walks = shared.walks[warp];
    const Item first = schedule.find(run.begin);
    if (threadIdx.x % 32 == 0) new (walks.walk) UnitWalk<Config>(schedule, units, run, first);
    __syncwarp();
    const auto& walk = *reinterpret_cast<const UnitWalk<Config>*>(walks.walk);
    UnitWalk<Config>::advance(walk, walks.copied, true);
    if (threadIdx.x % 32 == 0) walks.used = walks.copied;
    __syncwarp();
    const SegmentWalk<Config> copies(walk, walks.copied);
    SegmentQueue<T, Config> segments(queue, copier, schedule, copies);
    const OutputWriter<T, Config> part_merge(p, plan.group_size, schedule);
    UnitMerge<T, Config> merge(part_merge, plan, shared, run);
    WarpPartial<Config>& piece = shared.warps[warp].first;
    typename decltype(state)::Kept kept;
    auto& of_unit = sums_of_leaves(kept, shared, warp);
    bool pieces_in_use = false;  // by other warps, for the step before
    do {
        const UnitStep step = walks.used.step;
        const UnitShare own = walks.used.share;
        const UnitCut cut = units.cut(own.item);
        auto wait_for_pieces = [&] {
            if (pieces_in_use) __syncthreads();  // the pieces of the step before have been read
            pieces_in_use = false;
        };
        if (step.kind == StepKind::items) wait_for_pieces();  // some warps will have no use for theirs
#pragma unroll 1
        for (int32_t leaf = own.first; leaf < own.last; ++leaf) {
            segments.add(state, own.item, own.item.begin + cut.leaf_begin(leaf),
                         own.item.begin + cut.leaf_begin(leaf + 1));
            const int32_t last_of_unit = (1 << cut.leaves_log2) - 1, in_share = leaf - own.first;
            if (in_share & last_of_unit) state.add_to(of_unit);
            const bool unit_ends = (in_share & last_of_unit) == last_of_unit, is_last = leaf + 1 == own.last;
            // Units that have been added up.
            if (kByWarps && (unit_ends || is_last) && in_share > last_of_unit) state.add_to(piece);
            if (is_last) break;
            __syncwarp();  // all lanes have read what was left before
            if (kByWarps && unit_ends) {
                wait_for_pieces();
                state.leave(piece);
            } else {
                state.leave(of_unit);
            }
            __syncwarp();
        }
        if (step.kind == StepKind::items) {
            if (own.first < own.last) state.store();
            continue;
        }
        wait_for_pieces();
        __syncwarp();  // all lanes have read this warp's piece
        if (own.first < own.last) state.leave(piece);
        if (step.kind == StepKind::units) {
            __syncwarp();
            if (own.first < own.last) merge.push_unit(own.item, step.first + warp);
            continue;
        }
        __syncthreads();  // all pieces are there
        merge.add(step);
        pieces_in_use = true;
    } while (UnitWalk<Config>::advance(walk, walks.used, false));
    merge.finish(schedule);
}

}  // namespace octavo::cuda
