// From the pieces that warps and CTAs leave of an item to its result.
#pragma once

#include "cuda/decode/runs.cuh"
#include "cuda/decode/warp_attention.cuh"
#include "cuda/ptx/cluster.h"
#include "cuda/warp.cuh"

#include <cstddef>

namespace octavo::cuda {

struct StreamKLaunch {
    FastDivide group_size, page_size;
    bool pairs;  // CTAs are launched in clusters of two
    // Pieces of items that several CTAs share, two slots a CTA (the item from before, the item that goes on):
    // [2 * gridDim.x, kRows] rows of kWarpPartialRow floats.
    float* partial;
    uint32_t*
        counters;  // [gridDim.x, kRows], zero between launches: pieces of the item whose first CTA this is
};

template <class Config>
struct StreamKShared {
    struct alignas(128) Warp {
        union {
            alignas(128) uint4 blocks[Config::kStages][Config::kBlockChunks];
            WarpPartial<Config> last;  // once the last block has been used
        };
        alignas(
            128) uint4 queries[Config::kStages][Config::kQueryChunks];  // of as many items as blocks copied
        WarpPartial<Config> first;
    };
    Warp warps[Config::kWarps];
    ScheduleStorage<Config::kThreads> schedule;
    // What each warp leaves of the first item of its run, and of the last one; begin is -1 if it leaves none.
    Item items[2 * Config::kWarps];
    CutItem cut[2];  // the items at the start and at the end of the CTA's run, if shared with others

    __device__ const WarpPartial<Config>& piece(int index) const {
        const Warp& warp = warps[index / 2];
        return index % 2 == 0 ? warp.first : warp.last;
    }
};

// The places of a warp's blocks and queries in shared memory.
template <class Config>
class WarpQueue {
  public:
    __device__ explicit WarpQueue(const typename StreamKShared<Config>::Warp& warp)
        : blocks_(ptx::shared_address(warp.blocks)), queries_(ptx::shared_address(warp.queries)) {
        pin_in_register(blocks_);
        pin_in_register(queries_);
    }
    __device__ Rows<Config> k(int stage) const { return {blocks_ + stage * 16 * Config::kBlockChunks}; }
    __device__ Rows<Config> v(int stage) const {
        return {k(stage).address + 16 * kBlockKeys * Config::kRowChunks};
    }
    __device__ Rows<Config> queries(int index) const {
        return {queries_ + index * 16 * Config::kQueryChunks};
    }
    // The stage, or the index of queries, after this one.
    __device__ static int next(int stage) { return stage + 1 == Config::kStages ? 0 : stage + 1; }

  private:
    uint32_t blocks_, queries_;
};

// What a warp knows of parts, one a lane.
struct Weights {
    float max, sum, weight;  // of all; of this lane's part

    __device__ Weights(float part_max, float part_sum, float floor) {
        max = fmaxf(warp_max(part_max), floor);
        weight = part_max == -INFINITY ? 0.0f : ptx::exp2_approx(part_max - max);
        sum = warp_sum(weight * part_sum);
    }
};

// From partial results of a row to its result, by one warp.
template <class T, class Config, class Sequences = Schedule<Config::kThreads>>
class OutputWriter {
  public:
    __device__ OutputWriter(const AttentionParams& p, const FastDivide& group_size,
                            const Sequences& sequences)
        : p_(p),
          group_size_(group_size),
          sequences_(sequences),
          num_rows_(p.seqlen_q * static_cast<int32_t>(group_size.divisor)) {}

    __device__ int num_rows() const { return num_rows_; }  // of an item, at most

    __device__ static void add(float4& out, float weight, float4 x) {
        out.x += weight * x.x, out.y += weight * x.y, out.z += weight * x.z, out.w += weight * x.w;
    }

    // `count` parts of a row of an item, which max_of(part), sum_of(part) and out_of(part, column) read, to
    // its result.
    template <class MaxOf, class SumOf, class OutOf>
    __device__ void merge(const Item& item, int row, int count, MaxOf max_of, SumOf sum_of,
                          OutOf out_of) const {
        // Parts whose loads are under way together; those of a small count skip what they do not need.
        constexpr int kAtOnce = 32, kStep = 4;
        const int lane = threadIdx.x % 32;
        for (int column = lane; column < (kColumns + 31) / 32 * 32; column += 32) {
            const int from = column < kColumns ? 4 * column : 0;
            SoftmaxState state;
            float4 out = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll 1
            for (int32_t begin = 0; begin < count; begin += kAtOnce) {
                const int32_t here = min(kAtOnce, count - begin);
                const bool has_part = lane < here;
                const int own = begin + (has_part ? lane : 0);
                const float own_max = max_of(own);
                const float own_sum = sum_of(own);
                float4 x[kAtOnce];
#pragma unroll
                for (int i = 0; i < kAtOnce; ++i) {
                    if (i % kStep == 0 && i >= here) break;
                    x[i] = out_of(begin + min(i, here - 1), from);
                }
                const Weights weights(has_part ? own_max : -INFINITY, has_part ? own_sum : 0.0f, state.max);
                const float factor = state.raise(weights.max);
                state.sum += weights.sum;
                out.x *= factor, out.y *= factor, out.z *= factor, out.w *= factor;
#pragma unroll
                for (int i = 0; i < kAtOnce; ++i) {
                    if (i % kStep == 0 && i >= here) break;
                    add(out, __shfl_sync(~0u, weights.weight, i), x[i]);
                }
            }
            if (column < kColumns) store(item, row, from, state, out);
        }
    }

    // Where a row's result goes; null for a row that the item does not have.
    struct Target {
        T* out;
        float* lse;
    };
    __device__ Target target(const Item& item, int row) const {
        const SequenceSlice seq = sequences_.slice(item.sequence);
        const DecodeRow place(seq, group_size_, item.kv_head, row);
        if (!place.valid) return {nullptr, nullptr};
        return {static_cast<T*>(p_.out) + seq.out_begin + place.token * p_.out_token_stride +
                    place.head * p_.out_head_stride,
                p_.lse ? p_.lse + seq.lse_begin + place.token * p_.lse_token_stride +
                             place.head * p_.lse_head_stride
                       : nullptr};
    }

    // Four columns of a row's result.
    __device__ void store(const Item& item, int row, int column, const SoftmaxState& state,
                          float4 out) const {
        store(target(item, row), column, state, out);
    }
    __device__ void store(const Target& target, int column, const SoftmaxState& state, float4 out) const {
        if (!target.out || column >= p_.head_dim) return;
        const float scale = state.inverse_sum() * p_.out_scale;
        *reinterpret_cast<uint2*>(target.out + column) =
            make_uint2(pack<T>(out.x * scale, out.y * scale), pack<T>(out.z * scale, out.w * scale));
        if (target.lse && column == 0) *target.lse = state.lse();
    }

    static constexpr int kColumns = Config::kHeadDim / 4;  // groups of four

  private:
    const AttentionParams& p_;
    const FastDivide& group_size_;
    const Sequences& sequences_;
    int num_rows_;
};

// Both CTAs of a cluster together, once all their warps have left a piece of `item`: rows are shared out
// among all of them.
template <class T, class Config>
__device__ __forceinline__ void merge_pair(const OutputWriter<T, Config>& merge,
                                           StreamKShared<Config>& shared, const Item& item) {
    ptx::cluster_barrier();  // the pieces are there
    for (int row = 2 * (threadIdx.x / 32) + blockIdx.x % 2; row < merge.num_rows();
         row += 2 * Config::kWarps) {
        // `part`: a warp of one of the CTAs.
        auto address = [&](int part, int offset_bytes) {
            const auto& piece = shared.warps[part % Config::kWarps].first;
            return ptx::cluster_address(ptx::shared_address(&piece), part / Config::kWarps) + offset_bytes;
        };
        using Piece = WarpPartial<Config>;
        constexpr int kFloat = sizeof(float);
        merge.merge(
            item, row, 2 * Config::kWarps,
            [&](int part) {
                return ptx::load_cluster_float(address(part, offsetof(Piece, max) + kFloat * row));
            },
            [&](int part) {
                return ptx::load_cluster_float(address(part, offsetof(Piece, sum) + kFloat * row));
            },
            [&](int part, int column) {
                return ptx::load_cluster_float4(
                    address(part, kFloat * (row * Config::kWarpPartialRow + column)));
            });
    }
    ptx::cluster_barrier();  // nobody reads this CTA's memory any more
}

// A warp merges its share of the rows of the CTA's pieces.
template <class T, class Config>
class RowMerge {
  public:
    __device__ RowMerge(const OutputWriter<T, Config>& merge, const StreamKLaunch& plan,
                        const StreamKShared<Config>& shared)
        : merge_(merge), plan_(plan), shared_(shared) {
        // Pieces of one item follow each other. Lane l looks at piece l.
        const int lane = threadIdx.x % 32;
        begin_ = lane < kPieces ? shared.items[lane].begin : -1;
        pieces_ = __ballot_sync(~0u, begin_ >= 0);
        const uint32_t before = pieces_ & ((1u << lane) - 1);
        const int32_t begin_before = __shfl_sync(~0u, begin_, before ? 31 - __clz(before) : lane);
        starts_ = __ballot_sync(~0u, begin_ >= 0 && (!before || begin_before != begin_));
    }

    __device__ void operator()(int32_t cta_begin, int32_t cta_end) const {
        const int lane = threadIdx.x % 32;
        const int num_rows = merge_.num_rows();
        int cut_piece[2] = {-1, -1};  // of an item from before, of one that goes on
#pragma unroll 1
        for (uint32_t starts = starts_; starts;) {
            const int start = __ffs(starts) - 1;
            starts &= starts - 1;
            const uint32_t until_next = starts ? (starts & -starts) - 1 : ~0u;
            const Item item = shared_.items[start];
            const int slot = item.begin < cta_begin ? 0 : (item.end > cta_end ? 1 : -1);
#pragma unroll 1
            for (int row = row_of(0); row < num_rows; row += Config::kWarps) {
                merge_warps(item, pieces_ & until_next & ~((1u << start) - 1), row, slot);
            }
            if (slot == 0) cut_piece[0] = start;
            if (slot == 1) cut_piece[1] = start;
        }
        if (cut_piece[0] < 0 && cut_piece[1] < 0) return;
        __syncwarp();  // the rows' partial results are written
        // Lane 2 i + which tells of row i of the cut item `which`.
        bool is_last = false;
        if (row_of(lane / 2) < num_rows && (lane % 2 == 0 ? cut_piece[0] : cut_piece[1]) >= 0) {
            is_last = arrive(shared_.cut[lane % 2], row_of(lane / 2));
        }
        const uint32_t all_merges = __ballot_sync(~0u, is_last);
        __syncwarp();  // what the lanes that arrived last acquired, all lanes see
#pragma unroll 1
        for (uint32_t merges = all_merges; merges; merges &= merges - 1) {
            const int from = __ffs(merges) - 1, which = from % 2;
            merge_ctas(shared_.items[which == 0 ? cut_piece[0] : cut_piece[1]], shared_.cut[which],
                       row_of(from / 2));
        }
    }

  private:
    static constexpr int kPieces = 2 * Config::kWarps;
    static constexpr int kColumns = OutputWriter<T, Config>::kColumns;

    // The i-th row of this warp.
    __device__ static int row_of(int i) { return static_cast<int>(threadIdx.x / 32) + i * Config::kWarps; }

    // The CTA's `pieces` of an item: to its result, or to this CTA's partial slot.
    __device__ void merge_warps(const Item& item, uint32_t pieces, int row, int slot) const {
        const int lane = threadIdx.x % 32;
        const bool has_piece = pieces >> lane & 1;
        const int some_piece =
            __ffs(pieces) - 1;  // in the place of those that are not there, for a weight of 0
        const WarpPartial<Config>& own = shared_.piece(has_piece ? lane : some_piece);
        const Weights weights(has_piece ? own.max[row] : -INFINITY, has_piece ? own.sum[row] : 0.0f,
                              -INFINITY);
        for (int column = lane; column < (kColumns + 31) / 32 * 32; column += 32) {
            const int from = column < kColumns ? 4 * column : 0;
            float4 out = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll 1
            for (uint32_t rest = pieces; rest;) {  // two at a time; an odd one's partner weighs nothing
                const int i = __ffs(rest) - 1;
                rest &= rest - 1;
                const int j = rest ? __ffs(rest) - 1 : i;
                const float weight_j = rest ? __shfl_sync(~0u, weights.weight, j) : 0.0f;
                rest &= rest - 1;
                merge_.add(out, __shfl_sync(~0u, weights.weight, i), out_of(i, row, from));
                merge_.add(out, weight_j, out_of(j, row, from));
            }
            if (column >= kColumns) continue;
            if (slot < 0) {
                merge_.store(item, row, 4 * column, {weights.max, weights.sum}, out);
                continue;
            }
            float* const target = partial_row(2 * static_cast<int32_t>(blockIdx.x) + slot, row);
            *reinterpret_cast<float4*>(target + 4 * column) = out;
            if (column == 0) {
                target[Config::kHeadDim] = weights.max;
                target[Config::kHeadDim + 1] = weights.sum;
            }
        }
    }

    __device__ float* partial_row(int32_t slot, int row) const {
        return plan_.partial + (slot * Config::kRows + row) * Config::kWarpPartialRow;
    }

    __device__ float4 out_of(int piece, int row, int column) const {
        return *reinterpret_cast<const float4*>(&shared_.piece(piece).out[row][column]);
    }

    // Tells the other CTAs of a cut item that this one's piece is there; whether it is the last.
    __device__ bool arrive(const CutItem& cut, int row) const {
        const uint32_t others = cut.last - cut.first;
        uint32_t arrived;
        // Release: what this warp wrote; acquire: what the others did. Wraps to zero with the last piece.
        asm volatile("atom.acq_rel.gpu.global.inc.u32 %0, [%1], %2;"
                     : "=r"(arrived)
                     : "l"(plan_.counters + cut.first * Config::kRows + row), "r"(others)
                     : "memory");
        return arrived == others;
    }

    // The partial results of the CTAs of a cut item, in their order, to its result.
    __device__ void merge_ctas(const Item& item, const CutItem& cut, int row) const {
        auto source = [&](int part, int column) {
            return partial_row(2 * (cut.first + part) + (part == 0 ? 1 : 0), row) + column;
        };
        merge_.merge(
            item, row, cut.last - cut.first + 1,
            [&](int part) { return __ldcg(source(part, Config::kHeadDim)); },
            [&](int part) { return __ldcg(source(part, Config::kHeadDim + 1)); },
            [&](int part, int column) {
                return __ldcg(reinterpret_cast<const float4*>(source(part, column)));
            });
    }

    const OutputWriter<T, Config>& merge_;
    const StreamKLaunch& plan_;
    const StreamKShared<Config>& shared_;
    int32_t begin_;
    uint32_t pieces_, starts_;  // of the CTA; those that are the first of their item
};

}  // namespace octavo::cuda
