// From the pieces of warps to an item's result, where blocks are dealt out.
//
// Where several CTAs work on an item, each pushes its rows to a workspace, and CTAs of their own, mergers,
// wait for them there. There is no fence and no counter: the workspace is zero between launches, what is
// pushed never is, so that every 16 bytes tell by themselves whether they have come. Mergers are the last
// CTAs of the grid: CTAs start in order and the others wait for nobody, so that a merger never holds the
// place of one that it waits for.
#pragma once

#include "cuda/decode/merge.cuh"
#include "cuda/decode/tiles.h"
#include "cuda/ptx/relaxed.h"

namespace octavo::cuda {

struct SplitKvLaunch {
    FastDivide group_size, page_size;
    int32_t max_pages;             // of a sequence: columns of the page table
    int32_t pages_per_block_log2;  // that a block of keys may touch, at most
    int32_t num_parts;             // CTAs that work on an item, at most
    int32_t num_slots;             // CTAs that work on the items of a KV head
    int32_t num_mergers;           // of an item
    int32_t warps_per_row_log2;    // of mergers
    int32_t max_units_log2;        // batch-invariant: see Units
    bool many_units;               // so that most CTAs may have nothing to do, and look at the length first
    // Zero between launches: [batch, num_kv_heads, num_parts, rows of an item, kPartialRow], by length
    // [num_kv_heads, num_slots, ...].
    uint32_t* pushed;
    int32_t part_words;  // of a part
};

// A number as a word that is never zero.
struct NonZero {
    __device__ static uint32_t encode(float x) { return max(~__float_as_uint(x), 1u); }
    __device__ static float decode(uint32_t word) { return __uint_as_float(~word); }
};

__device__ __forceinline__ float4 operator+(const float4& a, const float4& b) {
    return make_float4(a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w);
}

// Adds a part of a row to those before it, four columns. kSameMax: both have one maximum, so that Rescale
// would multiply by one, exactly (or, of empty parts, add zeros).
template <bool kSameMax>
__device__ __forceinline__ void fold_part(SoftmaxState& all, float4& out, const SoftmaxState& part,
                                          const float4& more) {
    if constexpr (kSameMax) {
        all.sum += part.sum;
        out = out + more;
    } else {
        out = Rescale::add(all, part)(out, more);
    }
}

// The first `count` of kCount parts of a row, which all lanes know, added up from the left.
template <int kCount>
class PartFold {
  public:
    SoftmaxState state;

    __device__ PartFold(const SoftmaxState (&parts)[kCount], int count) : count_(count) {
        bool same_max = true;
#pragma unroll
        for (int i = 1; i < kCount; ++i) same_max = same_max && (i >= count || parts[i].max == parts[0].max);
        same_max_ = __all_sync(~0u, same_max);  // as each lane knows, but not the compiler
        state = parts[0];
        if (same_max_) {
#pragma unroll
            for (int i = 1; i < kCount; ++i) {
                if (i < count) state.sum += parts[i].sum;
            }
        } else {
#pragma unroll
            for (int i = 1; i < kCount; ++i) {
                if (i < count) steps_[i] = Rescale::add(state, parts[i]);
            }
        }
    }

    // Four columns.
    __device__ float4 operator()(const float4 (&parts)[kCount]) const {
        float4 out = parts[0];
        if (same_max_) {
#pragma unroll
            for (int i = 1; i < kCount; ++i) {
                if (i < count_) out = out + parts[i];
            }
        } else {
#pragma unroll
            for (int i = 1; i < kCount; ++i) {
                if (i < count_) out = steps_[i](out, parts[i]);
            }
        }
        return out;
    }

  private:
    Rescale steps_[kCount];
    int count_;
    bool same_max_;  // and so no steps
};

// kCount parts of a row, added up. Every lane knows maximum and sum of each.
template <int kCount>
class PartSum {
  public:
    SoftmaxState state;

    // Those behind the count are empty.
    __device__ explicit PartSum(const SoftmaxState (&parts)[kCount], int = kCount) {
#pragma unroll
        for (int i = 0; i < kCount; ++i) state.max = fmaxf(state.max, parts[i].max);
#pragma unroll
        for (int i = 0; i < kCount; ++i) {
            weights_[i] = ptx::exp2_approx(parts[i].max - state.safe_max());
            state.sum += weights_[i] * parts[i].sum;
        }
    }

    // Four columns.
    __device__ float4 operator()(const float4 (&parts)[kCount]) const {
        float4 out = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
        for (int i = 0; i < kCount; ++i) {
            out.x += weights_[i] * parts[i].x, out.y += weights_[i] * parts[i].y;
            out.z += weights_[i] * parts[i].z, out.w += weights_[i] * parts[i].w;
        }
        return out;
    }

  private:
    float weights_[kCount];
};

template <class Config>
struct SplitKvShared {
    union alignas(512) Warp {
        uint4 tiles[Config::kTiles][Config::kTileChunks];
        WarpPartial<Config> piece;  // once the last tile has been used
    };
    Warp warps[Config::kWarps];
    alignas(128) uint4 queries[Config::kQueryChunks];
};

// Batch-invariant, the parts are units, and add up as units.cuh says.
template <class T, class Config, class Sequences, SplitPolicy kPolicy>
class SplitKvCombine {
  public:
    __device__ SplitKvCombine(const OutputWriter<T, Config, Sequences>& merge, const SplitKvLaunch& plan,
                              const SplitKvShared<Config>& shared, const Item& item, int32_t first_part)
        : merge_(merge),
          plan_(plan),
          shared_(shared),
          item_(item),
          pushed_(plan.pushed + first_part * plan.part_words) {}

    // The pieces of the CTA's warps: to the result, or to the mergers.
    __device__ void merge_warps(int32_t part, int32_t num_parts, int32_t num_pieces) const {
        // Units that will not come are known to the mergers: the only one is the result.
        const bool pushes = (kPolicy == SplitPolicy::even ? plan_.num_parts : num_parts) > 1;
#pragma unroll 1
        for (int row = threadIdx.x / 32; row < merge_.num_rows(); row += Config::kWarps) {
            SoftmaxState states[Config::kWarps];
            for_each_warp([&](int i, const WarpPartial<Config>& piece) {
                states[i] = {piece.max[row], piece.sum[row]};
            });
            const Sum<Config::kWarps> sum(states, num_pieces);
            if (pushes) push_state(part, row, sum.state);
#pragma unroll
            for (int column = 4 * (threadIdx.x % 32); column < Config::kHeadDim; column += 4 * 32) {
                float4 outs[Config::kWarps];
                for_each_warp([&](int i, const WarpPartial<Config>& piece) {
                    outs[i] = *reinterpret_cast<const float4*>(&piece.out[row][column]);
                });
                if (pushes) {
                    push(part, row, column, sum(outs));
                } else {
                    merge_.store(item_, row, column, sum.state, sum(outs));
                }
            }
        }
    }

    // A merger's share of the item's rows, of which `num_parts` parts will come.
    __device__ void merge_parts(int32_t merger, int32_t num_parts, int32_t at_once) const {
        if (kPolicy != SplitPolicy::even && num_parts == 1) return;
        const int row =
            (merger * Config::kWarps + static_cast<int>(threadIdx.x / 32)) >> plan_.warps_per_row_log2;
        if (row < merge_.num_rows()) merge_parts_of(row, num_parts, at_once);
    }

  private:
    static constexpr bool kBatchInvariant = kPolicy == SplitPolicy::fixed;
    static constexpr int kColumns = Config::kHeadDim / 4;  // groups of four
    static constexpr int kAtOnce = 8;                      // parts whose loads are under way together
    template <int kCount>
    using Sum = std::conditional_t<kBatchInvariant, PartFold<kCount>, PartSum<kCount>>;

    template <class Body>
    __device__ void for_each_warp(Body body) const {
#pragma unroll
        for (int i = 0; i < Config::kWarps; ++i) body(i, shared_.warps[i].piece);
    }

    __device__ uint32_t* pushed_row(int32_t part, int row) const {
        return pushed_ + part * plan_.part_words + row * Config::kPartialRow;
    }

    // A copy for each warp that will read it and then set it to zero.
    __device__ void push_state(int32_t part, int row, const SoftmaxState& state) const {
        const int lane = threadIdx.x % 32;
        if (lane >> plan_.warps_per_row_log2 != 0) return;
        ptx::store_relaxed_8(pushed_row(part, row) + Config::kHeadDim + 2 * lane,
                             make_uint2(NonZero::encode(state.max), NonZero::encode(state.sum)));
    }
    // One word in four tells of all 16 bytes, which are written at once.
    __device__ void push(int32_t part, int row, int column, float4 out) const {
        ptx::store_relaxed_16(pushed_row(part, row) + column,
                              make_uint4(__float_as_uint(out.x), __float_as_uint(out.y),
                                         __float_as_uint(out.z), NonZero::encode(out.w)));
    }

    // The parts of a row: to the result. Warps of the row take columns in turn; within a warp, as many groups
    // of lanes take parts in turn, or, of units, kAtOnce that follow each other; `at_once` of these make a
    // part.
    __device__ void merge_parts_of(int row, int32_t num_parts, int32_t at_once) const {
        const int log2 = plan_.warps_per_row_log2, lane = threadIdx.x % 32;
        const int groups = 1 << log2, group = lane >> (5 - log2), lanes = 32 >> log2;
        const int warp = static_cast<int>(threadIdx.x / 32) & (groups - 1);
        // Of this group: the first part, and from one to the next.
        const int32_t first = kBatchInvariant ? kAtOnce * group : group;
        const int32_t stride = kBatchInvariant ? 1 : groups;
        const int32_t own_parts = kBatchInvariant ? max(min(num_parts - first, kAtOnce), 0)
                                                  : (num_parts - group + groups - 1) >> log2;
        const int state_at = Config::kHeadDim + 2 * warp;
        const auto target = merge_.target(item_, row);
        uint32_t* const rows = pushed_row(0, row);
        for (int base = 0; base < kColumns; base += 32) {
            const int place = base + warp * lanes + (lane & (lanes - 1));
            const bool has_column = kColumns % 32 == 0 || place < kColumns;
            const int column = 4 * min(place, kColumns - 1);  // read in vain where this lane has none
            SoftmaxState states[kAtOnce];
            float4 outs[kAtOnce];
            SoftmaxState state;
            float4 out = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
            if constexpr (kBatchInvariant) {
                load_parts(states, outs, rows, state_at, column, has_column, first, stride, num_parts);
                if (have_same_max(states, own_parts)) {
                    fold_units<true>(state, out, states, outs, own_parts, num_parts, at_once, lanes);
                } else {
                    fold_units<false>(state, out, states, outs, own_parts, num_parts, at_once, lanes);
                }
            } else {
#pragma unroll 1
                for (int32_t i = first; i - group < num_parts; i += kAtOnce * groups) {
                    load_parts(states, outs, rows, state_at, column, has_column, i, stride, num_parts);
                    const PartSum<kAtOnce> sum(states);
                    out = Rescale::add(state, sum.state)(out, sum(outs));
                }
#pragma unroll 1
                for (int step = lanes; step < 32; step *= 2) {  // over the groups
                    const SoftmaxState other{__shfl_xor_sync(~0u, state.max, step),
                                             __shfl_xor_sync(~0u, state.sum, step)};
                    const float4 more =
                        make_float4(__shfl_xor_sync(~0u, out.x, step), __shfl_xor_sync(~0u, out.y, step),
                                    __shfl_xor_sync(~0u, out.z, step), __shfl_xor_sync(~0u, out.w, step));
                    out = Rescale::add(state, other)(out, more);
                }
            }
            if (group == 0 && has_column) merge_.store(target, column, state, out);
            // As the next launch wants them.
            uint32_t* words = rows + first * plan_.part_words;
#pragma unroll 1
            for (int32_t i = 0; i < own_parts; ++i, words += stride * plan_.part_words) {
                if (has_column) *reinterpret_cast<uint4*>(words + column) = make_uint4(0, 0, 0, 0);
                if (base + 32 >= kColumns && (lane & (lanes - 1)) == 0) {
                    *reinterpret_cast<uint2*>(words + state_at) = make_uint2(0, 0);
                }
            }
        }
    }

    // Waits for parts `first`, first + stride and so on. In the place of one that is not there, the last one
    // is waited for and left out: of loads that depend on a condition each, not all would be under way at
    // once.
    __device__ void load_parts(SoftmaxState (&states)[kAtOnce], float4 (&outs)[kAtOnce], const uint32_t* rows,
                               int state_at, int column, bool has_column, int32_t first, int32_t stride,
                               int32_t num_parts) const {
        const uint32_t not_needed = has_column ? 0 : 1;
        uint2 parts[kAtOnce];
        uint4 words[kAtOnce];
        uint32_t least;  // of the words that tell
        do {
#pragma unroll
            for (int i = 0; i < kAtOnce; ++i) {
                const uint32_t* const row = rows + min(first + i * stride, num_parts - 1) * plan_.part_words;
                parts[i] = ptx::load_relaxed_8(row + state_at);
                words[i] = ptx::load_relaxed_16(row + column);
            }
            least = ~0u;
#pragma unroll
            for (int i = 0; i < kAtOnce; ++i) {
                least = min(least, min(min(parts[i].x, parts[i].y), words[i].w | not_needed));
            }
        } while (__any_sync(~0u, least == 0));
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
            states[i] = SoftmaxState{};
            outs[i] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
            if (first + i * stride >= num_parts) continue;
            states[i] = {NonZero::decode(parts[i].x), NonZero::decode(parts[i].y)};
            outs[i] = make_float4(__uint_as_float(words[i].x), __uint_as_float(words[i].y),
                                  __uint_as_float(words[i].z), NonZero::decode(words[i].w));
        }
    }

    // Whether all parts, of which this lane has the first `count`, have one maximum.
    __device__ static bool have_same_max(const SoftmaxState (&states)[kAtOnce], int count) {
        const float max = __shfl_sync(~0u, states[0].max, 0);
        bool same = true;
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) same = same && (i >= count || states[i].max == max);
        return __all_sync(~0u, same);
    }

    // Adds up the units of all groups, of which this one has `count`: `at_once` that follow each other, which
    // are in one group, then these parts.
    template <bool kSameMax>
    __device__ static void fold_units(SoftmaxState& state, float4& out, SoftmaxState (&states)[kAtOnce],
                                      float4 (&outs)[kAtOnce], int32_t count, int32_t num_units,
                                      int32_t at_once, int lanes) {
#pragma unroll
        for (int i = 1; i < kAtOnce; ++i) {  // of the part so far
            if ((i & (at_once - 1)) == 0 || i >= count) continue;
            SoftmaxState part = states[i - 1];
            float4 sum = outs[i - 1];
            fold_part<kSameMax>(part, sum, states[i], outs[i]);
            states[i] = part;
            outs[i] = sum;
        }
#pragma unroll 1
        for (int32_t first = 0, lane = threadIdx.x % lanes; first < num_units;
             first += kAtOnce, lane += lanes) {
#pragma unroll
            for (int i = 0; i < kAtOnce; ++i) {
                const int32_t unit = first + i;
                if (unit >= num_units || (((i + 1) & (at_once - 1)) != 0 && unit + 1 < num_units)) continue;
                const SoftmaxState part{kSameMax ? states[i].max : __shfl_sync(~0u, states[i].max, lane),
                                        __shfl_sync(~0u, states[i].sum, lane)};
                const float4 more =
                    make_float4(__shfl_sync(~0u, outs[i].x, lane), __shfl_sync(~0u, outs[i].y, lane),
                                __shfl_sync(~0u, outs[i].z, lane), __shfl_sync(~0u, outs[i].w, lane));
                if (unit < at_once) {
                    state = part;
                    out = more;
                } else {
                    fold_part<kSameMax>(state, out, part, more);
                }
            }
        }
    }

    const OutputWriter<T, Config, Sequences>& merge_;
    const SplitKvLaunch& plan_;
    const SplitKvShared<Config>& shared_;
    Item item_;
    uint32_t* pushed_;  // of the item's first part
};

}  // namespace octavo::cuda
