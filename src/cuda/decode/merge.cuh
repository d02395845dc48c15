// From the pieces that warps and CTAs leave of an item to its result.
#pragma once

#include "cuda/decode/item.cuh"
#include "cuda/warp.cuh"

namespace octavo::cuda {

struct DecodePlan {
    FastDivide group_size, page_size;
    // Pieces of items that several CTAs share, two slots a CTA (the item from before, the item that goes on):
    // weighted sums [2 * gridDim.x, kRows, kHeadDim], then maxima and sums of weights [2 * gridDim.x, kRows].
    float* partial_out;
    float* partial_max;
    float* partial_sum;
    uint32_t*
        counters;  // [gridDim.x, kRows], zero between launches: pieces of the item whose first CTA this is
};

// The CTAs that share an item.
struct CutItem {
    int32_t first, last;
};

template <class Config>
struct DecodeShared {
    struct alignas(128) Warp {
        union {
            alignas(128) uint4 blocks[Config::kStages][Config::kBlockChunks];
            DecodePiece<Config> last;  // once the last block has been used
        };
        alignas(
            128) uint4 queries[Config::kStages][Config::kQueryChunks];  // of as many items as blocks copied
        DecodePiece<Config> first;
    };
    Warp warps[Config::kWarps];
    ScheduleStorage<Config::kThreads> schedule;
    // What each warp leaves of the first item of its run, and of the last one; begin is -1 if it leaves none.
    Item items[2 * Config::kWarps];
    CutItem cut[2];  // the items at the start and at the end of the CTA's run, if shared with others

    __device__ const DecodePiece<Config>& piece(int index) const {
        const Warp& warp = warps[index / 2];
        return index % 2 == 0 ? warp.first : warp.last;
    }
};

// A warp merges its share of the rows of the CTA's pieces.
template <class T, class Config>
class RowMerge {
  public:
    __device__ RowMerge(const ForwardParams& p, const DecodePlan& plan,
                        const Schedule<Config::kThreads>& schedule, const DecodeShared<Config>& shared)
        : p_(p), plan_(plan), schedule_(schedule), shared_(shared) {
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
        const int num_rows = p_.seqlen_q * p_.group_size();  // of an item, at most
        int cut_piece[2] = {-1, -1};                         // of an item from before, of one that goes on
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
#pragma unroll 1
        for (uint32_t merges = __ballot_sync(~0u, is_last); merges; merges &= merges - 1) {
            const int from = __ffs(merges) - 1, which = from % 2;
            merge_ctas(shared_.items[which == 0 ? cut_piece[0] : cut_piece[1]], shared_.cut[which],
                       row_of(from / 2));
        }
    }

  private:
    static constexpr int kPieces = 2 * Config::kWarps;
    static constexpr int kColumns = Config::kHeadDim / 4;  // groups of four

    // The i-th row of this warp.
    __device__ static int row_of(int i) { return static_cast<int>(threadIdx.x / 32) + i * Config::kWarps; }

    // What a warp knows of pieces, one a lane.
    struct Weights {
        float max, sum, weight;  // of all; of this lane's piece

        __device__ Weights(float piece_max, float piece_sum, float floor) {
            max = fmaxf(warp_max(piece_max), floor);
            weight = piece_max == -INFINITY ? 0.0f : ptx::exp2_approx(piece_max - max);
            sum = warp_sum(weight * piece_sum);
        }
    };

    __device__ static void add(float4& out, float weight, float4 x) {
        out.x += weight * x.x, out.y += weight * x.y, out.z += weight * x.z, out.w += weight * x.w;
    }

    // The CTA's `pieces` of an item: to its result, or to this CTA's partial slot.
    __device__ void merge_warps(const Item& item, uint32_t pieces, int row, int slot) const {
        const int lane = threadIdx.x % 32;
        const bool has_piece = pieces >> lane & 1;
        const int some_piece =
            __ffs(pieces) - 1;  // in the place of those that are not there, for a weight of 0
        const DecodePiece<Config>& own = shared_.piece(has_piece ? lane : some_piece);
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
                add(out, __shfl_sync(~0u, weights.weight, i), out_of(i, row, from));
                add(out, weight_j, out_of(j, row, from));
            }
            if (column >= kColumns) continue;
            if (slot < 0) {
                store(item, row, 4 * column, {weights.max, weights.sum}, out);
                continue;
            }
            const int32_t slot_row = (2 * static_cast<int32_t>(blockIdx.x) + slot) * Config::kRows + row;
            *reinterpret_cast<float4*>(plan_.partial_out + slot_row * Config::kHeadDim + 4 * column) = out;
            if (column == 0) {
                plan_.partial_max[slot_row] = weights.max;
                plan_.partial_sum[slot_row] = weights.sum;
            }
        }
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
        // Pieces whose loads are under way together; those of a small count skip what they do not need.
        constexpr int kAtOnce = 32, kStep = 4;
        const int lane = threadIdx.x % 32;
        const int32_t first = cut.first, count = cut.last - first + 1;
        auto slot_row = [&](int32_t i) { return (2 * (first + i) + (i == 0 ? 1 : 0)) * Config::kRows + row; };
        for (int column = lane; column < (kColumns + 31) / 32 * 32; column += 32) {
            const int from = column < kColumns ? 4 * column : 0;
            SoftmaxState state;
            float4 out = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll 1
            for (int32_t begin = 0; begin < count; begin += kAtOnce) {
                const int32_t here = min(kAtOnce, count - begin);
                const bool has_piece = lane < here;
                const int32_t own = slot_row(begin + (has_piece ? lane : 0));
                const float own_max = __ldcg(plan_.partial_max + own),
                            own_sum = __ldcg(plan_.partial_sum + own);
                float4 x[kAtOnce];
#pragma unroll
                for (int i = 0; i < kAtOnce; ++i) {
                    if (i % kStep == 0 && i >= here) break;
                    const int32_t piece = begin + min(i, here - 1);
                    const float* const source = plan_.partial_out + slot_row(piece) * Config::kHeadDim + from;
                    x[i] = __ldcg(reinterpret_cast<const float4*>(source));
                }
                const Weights weights(has_piece ? own_max : -INFINITY, has_piece ? own_sum : 0.0f, state.max);
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

    // Four columns of a row's result.
    __device__ void store(const Item& item, int row, int column, const SoftmaxState& state,
                          float4 out) const {
        const SequenceSlice seq = schedule_.slice(item.sequence);
        const DecodeRow place(seq, plan_.group_size, item.kv_head, row);
        if (!place.valid || column >= p_.head_dim) return;
        const float scale = state.inverse_sum() * p_.out_scale;
        T* const target = static_cast<T*>(p_.out) + seq.out_begin + place.token * p_.out_token_stride +
                          place.head * p_.out_head_stride + column;
        *reinterpret_cast<uint2*>(target) =
            make_uint2(pack<T>(out.x * scale, out.y * scale), pack<T>(out.z * scale, out.w * scale));
        if (p_.lse && column == 0) {
            p_.lse[seq.lse_begin + place.token * p_.lse_token_stride + place.head * p_.lse_head_stride] =
                state.lse();
        }
    }

    const ForwardParams& p_;
    const DecodePlan& plan_;
    const Schedule<Config::kThreads>& schedule_;
    const DecodeShared<Config>& shared_;
    int32_t begin_;
    uint32_t pieces_, starts_;  // of the CTA; those that are the first of their item
};

}  // namespace octavo::cuda
