// Combines the partial results of warps into an item's result, in the split-KV kernel.
//
// Where several CTAs work on an item, each pushes its rows to a workspace, where those who combine wait for
// them (partial.cuh): either separate CTAs, the combiners, which are the last of the grid, or the item's last
// split. Both wait for no CTA with a higher index.
#pragma once

#include "cuda/decode/combine.cuh"
#include "cuda/decode/output.cuh"
#include "cuda/decode/parameters.h"
#include "cuda/decode/partial.cuh"
#include "cuda/decode/visible_blocks.cuh"
#include "cuda/decode/warp_attention.cuh"

#include <type_traits>

namespace octavo::cuda {

// The tiles of a warp and, for codes, the scales of its blocks.
template <class Config, bool kHasCodes = Config::kHasCodes>
struct WarpTiles {
    uint4 tiles[Config::kTiles][Config::kTileChunks];
};
template <class Config>
struct WarpTiles<Config, true> {
    uint4 tiles[Config::kTiles][Config::kTileChunks];
    uint4 scales[Config::kScaleTiles][Config::kScaleChunks];
};

template <class Config>
struct SplitKvShared {
    union alignas(512) Warp {
        WarpTiles<Config> blocks;
        WarpPartial<Config> partial;  // takes their place once the last tile has been used
    };
    Warp warps[Config::kWarps];
    alignas(128) uint4 queries[Config::kQueryChunks];
    VisibleBlocks visible[Config::kWarps];  // one for each warp; used where there is a window
    struct {
        void* out;
        float* lse;
    } targets[Config::kRows];  // where results go
};

// The ring of a warp's scales. next() is the place to which the next block's scales are copied and, after
// advance(), the place of the scales of the block that is used next.
template <class Config>
class ScaleRing {
  public:
    __device__ explicit ScaleRing(const typename SplitKvShared<Config>::Warp& warp) {
        if constexpr (Config::kHasCodes) first_ = ptx::shared_address(warp.blocks.scales);
    }
    __device__ uint32_t next() const { return first_ + place_ * 16 * Config::kScaleChunks; }
    __device__ void advance() {
        if constexpr (Config::kHasCodes) place_ = place_ + 1 == Config::kScaleTiles ? 0 : place_ + 1;
    }

  private:
    uint32_t first_ = 0;
    int place_ = 0;
};

// kFixed: the call is batch-invariant, so that partial results are combined in the order of fixed_splits.h.
template <class T, class Config, class Sequences, bool kFixed>
class SplitKvCombine {
  public:
    // `first_partial`: the index of the item's first partial result in the workspace.
    __device__ SplitKvCombine(const OutputWriter<T, Sequences>& writer, const SplitKvLaunch& launch,
                              SplitKvShared<Config>& shared, const Item& item, int32_t first_partial)
        : writer_(writer),
          launch_(launch),
          shared_(shared),
          item_(item),
          partials_(launch.partial.words + first_partial * launch.partial_words) {}

    // Finds where the results of rows go; other warps may read that behind __syncthreads(). It is done early,
    // since at the end all would wait for it.
    __device__ void prepare() const {
#pragma unroll 1  // most warps have one row, and code that does not run has to be fetched all the same
        for (int row = threadIdx.x / 32; row < writer_.num_rows(); row += Config::kWarps) {
            const auto target = writer_.target(item_, row);
            if (threadIdx.x % 32 == 0) shared_.targets[row] = {target.out, target.lse};
        }
    }

    // Combines the partial results of the CTA's warps, into the result if it is the only split, or into a
    // partial result for whoever combines those of the splits.
    __device__ void combine_warps(int32_t split, int32_t num_warps, bool is_only_split) const {
        const int lane = threadIdx.x % 32;
#pragma unroll 1
        for (int row = threadIdx.x / 32; row < writer_.num_rows(); row += Config::kWarps) {
            const PartialRow<Config> target{row_words(row) + split * launch_.partial_words};
            SoftmaxState states[Config::kWarps];
            for_each_warp([&](int i, const WarpPartial<Config>& partial) {
                const float2 state = partial.states[row];
                states[i] = {state.x, state.y};
            });
            const Combined<Config::kWarps> combined(states, num_warps);
            if (!is_only_split && lane >> launch_.warps_per_row_log2 == 0)
                target.push_state(combined.state, lane);
#pragma unroll
            for (int column = 4 * lane; column < Config::kHeadDim; column += 4 * 32) {
                float4 outs[Config::kWarps];
                for_each_warp([&](int i, const WarpPartial<Config>& partial) {
                    outs[i] = *reinterpret_cast<const float4*>(&partial.out[row][column]);
                });
                if (is_only_split) {
                    writer_.store(result_of(row), item_, row, column, combined.state, combined(outs));
                } else {
                    target.push(column, combined(outs));
                }
            }
        }
    }

    // Combines this CTA's share of the item's rows, as one of several combiners, each from `num_splits`
    // partial results.
    __device__ void combine_splits(int32_t combiner, int32_t num_combiners, int32_t num_splits,
                                   int32_t splits_of_subtotal) const {
        const int warp = static_cast<int>(threadIdx.x / 32), log2 = launch_.warps_per_row_log2;
#pragma unroll 1
        for (int row = (combiner * Config::kWarps + warp) >> log2; row < writer_.num_rows();
             row += num_combiners * Config::kWarps >> log2)
            combine_row(row, num_splits, splits_of_subtotal);
    }

  private:
    static constexpr int kColumns = Config::kHeadDim / 4;  // groups of four
    static constexpr int kAtOnce = 8;  // partial results whose loads are in flight together
    template <int kCount>
    using Combined = std::conditional_t<kFixed, CombinedInOrder<kCount>, CombinedAtOnce<kCount>>;

    template <class Body>
    __device__ void for_each_warp(Body body) const {
#pragma unroll
        for (int i = 0; i < Config::kWarps; ++i) body(i, shared_.warps[i].partial);
    }

    __device__ typename OutputWriter<T, Sequences>::Target result_of(int row) const {
        const auto& found = shared_.targets[row];
        return {static_cast<T*>(found.out), found.lse};
    }
    // The words of a row of the item's first partial result.
    __device__ uint32_t* row_words(int row) const { return partials_ + row * Config::kPartialRow; }

    // The warps of a row divide its columns. Within a warp, as many groups of lanes divide the partial
    // results: they take turns at them or, where the order of addition counts, each has kAtOnce that follow
    // each other.
    __device__ void combine_row(int row, int32_t num_splits, int32_t splits_of_subtotal) const {
        const int log2 = launch_.warps_per_row_log2, lane = threadIdx.x % 32;
        const int groups = 1 << log2, group = lane >> (5 - log2), lanes = 32 >> log2;
        const int warp = static_cast<int>(threadIdx.x / 32) & (groups - 1);
        // This group's first partial result, and the step from one of its partial results to the next.
        const int32_t first = kFixed ? kAtOnce * group : group;
        const int32_t step = kFixed ? 1 : groups;
        const PartialRows<Config> partials{row_words(row), launch_.partial_words, num_splits, warp};
        for (int base = 0; base < kColumns; base += 32) {
            const int place = base + warp * lanes + (lane & (lanes - 1));
            const bool has_column = kColumns % 32 == 0 || place < kColumns;
            const int column = 4 * min(place, kColumns - 1);   // lanes without a column read the last one
            const bool clears_states = base + 32 >= kColumns;  // the last time that they are read
            SoftmaxState states[kAtOnce];
            float4 outs[kAtOnce];
            SoftmaxState state;
            float4 out = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
            if constexpr (kFixed) {
                partials.template take<kAtOnce>(states, outs, column, has_column, clears_states, first, step);
                const int32_t own_splits = max(min(num_splits - first, kAtOnce), 0);
                if (have_same_max(states, own_splits)) {
                    add_all_in_order<true>(state, out, states, outs, own_splits, num_splits,
                                           splits_of_subtotal, lanes);
                } else {
                    add_all_in_order<false>(state, out, states, outs, own_splits, num_splits,
                                            splits_of_subtotal, lanes);
                }
            } else {
#pragma unroll 1
                for (int32_t i = first; i - group < num_splits; i += kAtOnce * step) {
                    partials.template take<kAtOnce>(states, outs, column, has_column, clears_states, i, step);
                    const CombinedAtOnce<kAtOnce> combined(states);
                    out = Rescale::add(state, combined.state)(out, combined(outs));
                }
#pragma unroll 1
                for (int distance = lanes; distance < 32; distance *= 2) {  // combines the groups
                    const SoftmaxState other{__shfl_xor_sync(~0u, state.max, distance),
                                             __shfl_xor_sync(~0u, state.sum, distance)};
                    const float4 other_out = make_float4(
                        __shfl_xor_sync(~0u, out.x, distance), __shfl_xor_sync(~0u, out.y, distance),
                        __shfl_xor_sync(~0u, out.z, distance), __shfl_xor_sync(~0u, out.w, distance));
                    out = Rescale::add(state, other)(out, other_out);
                }
            }
            if (group == 0 && has_column) writer_.store(result_of(row), item_, row, column, state, out);
        }
    }

    // Whether all partial results of the row have the same maximum. This lane has the first `count` of
    // `states`.
    __device__ static bool have_same_max(const SoftmaxState (&states)[kAtOnce], int count) {
        const float max = __shfl_sync(~0u, states[0].max, 0);
        bool same = true;
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) same = same && (i >= count || states[i].max == max);
        return __all_sync(~0u, same);
    }

    // Combines the partial results of all groups in order; this group has `count` of them. The partial
    // results of each subtotal, which are in one group, come first, then the subtotals.
    template <bool kSameMax>
    __device__ static void add_all_in_order(SoftmaxState& state, float4& out, SoftmaxState (&states)[kAtOnce],
                                            float4 (&outs)[kAtOnce], int32_t count, int32_t num_splits,
                                            int32_t splits_of_subtotal, int lanes) {
#pragma unroll
        for (int i = 1; i < kAtOnce; ++i) {  // states[i] becomes its subtotal so far
            if ((i & (splits_of_subtotal - 1)) == 0 || i >= count) continue;
            SoftmaxState subtotal = states[i - 1];
            float4 subtotal_out = outs[i - 1];
            add_in_order<kSameMax>(subtotal, subtotal_out, states[i], outs[i]);
            states[i] = subtotal;
            outs[i] = subtotal_out;
        }
#pragma unroll 1
        for (int32_t first = 0, lane = threadIdx.x % lanes; first < num_splits;
             first += kAtOnce, lane += lanes) {
#pragma unroll
            for (int i = 0; i < kAtOnce; ++i) {
                const int32_t split = first + i;
                const bool ends_subtotal =
                    ((i + 1) & (splits_of_subtotal - 1)) == 0 || split + 1 == num_splits;
                if (split >= num_splits || !ends_subtotal) continue;
                const SoftmaxState subtotal{kSameMax ? states[i].max : __shfl_sync(~0u, states[i].max, lane),
                                            __shfl_sync(~0u, states[i].sum, lane)};
                const float4 subtotal_out =
                    make_float4(__shfl_sync(~0u, outs[i].x, lane), __shfl_sync(~0u, outs[i].y, lane),
                                __shfl_sync(~0u, outs[i].z, lane), __shfl_sync(~0u, outs[i].w, lane));
                if (split < splits_of_subtotal) {
                    state = subtotal;
                    out = subtotal_out;
                } else {
                    add_in_order<kSameMax>(state, out, subtotal, subtotal_out);
                }
            }
        }
    }

    const OutputWriter<T, Sequences>& writer_;
    const SplitKvLaunch& launch_;
    SplitKvShared<Config>& shared_;
    Item item_;
    uint32_t* partials_;  // the partial results of the item
};

}  // namespace octavo::cuda
