// Combines the partial results of warps and CTAs into an item's result, in the stream-K kernel.
//
// A warp leaves up to two partial results in shared memory: of the first item of its run, and of the last
// one. The CTA combines those of each item. If the item goes on in the next CTA, the CTA pushes the combined
// one to the workspace (partial.cuh); the CTA that has the item's end waits for the partial results of the
// CTAs before it, after all else is done.
#pragma once

#include "cuda/decode/combine.cuh"
#include "cuda/decode/output.cuh"
#include "cuda/decode/parameters.h"
#include "cuda/decode/partial.cuh"
#include "cuda/decode/stream_k_copy.cuh"
#include "cuda/decode/stream_k_ranges.cuh"
#include "cuda/decode/warp_attention.cuh"
#include "cuda/warp.cuh"

namespace octavo::cuda {

template <class Config>
struct StreamKShared {
    struct alignas(Config::kHasCodes ? 512 : 128) Warp {
        union {
            // Where the cache holds codes, all scales lie behind the blocks.
            alignas(128) uint4 blocks[Config::kStages * (Config::kBlockChunks + Config::kScaleChunks)];
            WarpPartial<Config> last;  // takes their place once the last block has been used
        };
        alignas(
            128) uint4 queries[Config::kStages][Config::kQueryChunks];  // each copied block may need its own
        WarpPartial<Config> first;
        VisibleBlocks visible[2];
    };
    Warp warps[Config::kWarps];
    ScheduleStorage<Config::kThreads> schedule;
    // The first item of each warp's run and the last one, of which it leaves partial results; begin is -1 if
    // it leaves none.
    Item items[2 * Config::kWarps];
    int32_t first_cta;  // the first CTA that has blocks of the item with which this CTA's run begins

    __device__ const WarpPartial<Config>& partial(int index) const {
        const Warp& warp = warps[index / 2];
        return index % 2 == 0 ? warp.first : warp.last;
    }
};

template <class T, class Config>
class StreamKCombine {
  public:
    using Writer = OutputWriter<T, Schedule<Config>>;

    __device__ StreamKCombine(const Writer& writer, const StreamKLaunch& launch,
                              const StreamKShared<Config>& shared, int32_t cta)
        : writer_(writer), launch_(launch), shared_(shared), cta_(cta) {}

    // Combines the partial results of a CTA whose run of blocks is [begin, end). Each warp does this for its
    // share of the rows.
    __device__ void combine(int32_t begin, int32_t end) const {
        // Lane l looks at partial result l. Those of one item follow each other.
        const int lane = threadIdx.x % 32;
        const int32_t item_begin = lane < kPartials ? shared_.items[lane].begin : -1;
        const uint32_t all = __ballot_sync(~0u, item_begin >= 0);
        const uint32_t before = all & ((1u << lane) - 1);
        const int32_t begin_before = __shfl_sync(~0u, item_begin, before ? 31 - __clz(before) : lane);
        const uint32_t all_starts =
            __ballot_sync(~0u, item_begin >= 0 && (!before || begin_before != item_begin));
        uint32_t waits = 0;  // the partial results of an item that began in an earlier CTA and ends here
#pragma unroll 1
        for (uint32_t starts = all_starts; starts;) {
            const int start = __ffs(starts) - 1;
            starts &= starts - 1;
            const uint32_t until_next = starts ? (starts & -starts) - 1 : ~0u;
            const uint32_t partials = all & until_next & ~((1u << start) - 1);
            const Item item = shared_.items[start];
            if (item.end > end) {
                combine_rows<Destination::next_cta>(item, partials);
            } else if (item.begin < begin) {
                waits = partials;
            } else {
                combine_rows<Destination::result>(item, partials);
            }
        }
        if (waits) combine_rows<Destination::result_with_others>(shared_.items[__ffs(waits) - 1], waits);
    }

  private:
    enum class Destination { next_cta, result, result_with_others };
    static constexpr int kPartials = 2 * Config::kWarps;
    static_assert(kPartials <= 32, "a lane looks at each");
    static constexpr int kColumns = Config::kHeadDim / 4;  // groups of four
    static constexpr int kAtOnce = 8;                      // CTAs whose partial results are loaded together

    template <Destination kTo>
    __device__ __forceinline__ void combine_rows(const Item& item, uint32_t partials) const {
#pragma unroll 1
        for (int row = threadIdx.x / 32; row < writer_.num_rows(); row += Config::kWarps) {
            combine_row<kTo>(item, partials, row);
        }
    }

    template <Destination kTo>
    __device__ __forceinline__ void combine_row(const Item& item, uint32_t partials, int row) const {
        const int lane = threadIdx.x % 32;
        const bool has_partial = partials >> lane & 1;
        const int some = __ffs(partials) - 1;  // lanes without one read this one, with a weight of 0
        const WarpPartial<Config>& own = shared_.partial(has_partial ? lane : some);
        const float2 own_words = own.states[row];
        const float max = has_partial ? own_words.x : -INFINITY, sum = has_partial ? own_words.y : 0.0f;
        const float row_max = warp_max(max);
        const float weight = max == -INFINITY ? 0.0f : ptx::exp2_approx(max - row_max);
        const SoftmaxState own_state{row_max, warp_sum(weight * sum)};
        const PartialRow<Config> target{row_words(cta_, row)};
        const int32_t first_cta = shared_.first_cta;
        const PartialRows<Config> others{row_words(first_cta, row), launch_.partial_words, cta_ - first_cta,
                                         0};
        if (kTo == Destination::next_cta && lane == 0) target.push_state(own_state, 0);
#pragma unroll 1
        for (int base = 0; base < kColumns; base += 32) {
            const bool has_column = kColumns % 32 == 0 || base + lane < kColumns;
            const int column = 4 * min(base + lane, kColumns - 1);
            SoftmaxState state = own_state;
            float4 out = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll 1
            for (uint32_t rest = partials; rest;) {  // two at a time; the last may have a partner of weight 0
                const int i = __ffs(rest) - 1;
                rest &= rest - 1;
                const int j = rest ? __ffs(rest) - 1 : i;
                const float weight_j = rest ? __shfl_sync(~0u, weight, j) : 0.0f;
                rest &= rest - 1;
                add(out, __shfl_sync(~0u, weight, i), out_of(i, row, column));
                add(out, weight_j, out_of(j, row, column));
            }
            if constexpr (kTo == Destination::result_with_others) {
#pragma unroll 1
                for (int32_t first = 0; first < others.count; first += kAtOnce) {
                    SoftmaxState states[kAtOnce];
                    float4 outs[kAtOnce];
                    others.template take<kAtOnce>(states, outs, column, has_column, base + 32 >= kColumns,
                                                  first, 1);
                    const CombinedAtOnce<kAtOnce> combined(states);
                    out = Rescale::add(state, combined.state)(out, combined(outs));
                }
            }
            if (!has_column) continue;
            if constexpr (kTo == Destination::next_cta) {
                target.push(column, out);
            } else {
                writer_.store(item, row, column, state, out);
            }
        }
    }

    __device__ static void add(float4& out, float weight, float4 x) {
        out.x += weight * x.x, out.y += weight * x.y, out.z += weight * x.z, out.w += weight * x.w;
    }
    __device__ float4 out_of(int partial, int row, int column) const {
        return *reinterpret_cast<const float4*>(&shared_.partial(partial).out[row][column]);
    }
    // Every CTA pushes one partial result at most: that of the item that goes on after its run.
    __device__ uint32_t* row_words(int32_t cta, int row) const {
        return launch_.partial.words + cta * launch_.partial_words + row * Config::kPartialRow;
    }

    const Writer& writer_;
    const StreamKLaunch& launch_;
    const StreamKShared<Config>& shared_;
    int32_t cta_;
};

}  // namespace octavo::cuda
