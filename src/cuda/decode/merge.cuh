// From the pieces that warps and CTAs leave of an item to its result.
#pragma once

#include "cuda/decode/item.cuh"
#include "cuda/warp.cuh"

namespace octavo::cuda {

struct DecodePlan {
    FastDivide group_size, page_size;
    int32_t min_blocks;  // a CTA's share is at least so many blocks
    // Pieces of items that several CTAs share, two slots a CTA (the item from before, the item that goes on):
    // weighted sums [2 * gridDim.x, kRows, head_dim], then maxima and sums of weights [2 * gridDim.x, kRows].
    float* partial_out;
    float* partial_max;
    float* partial_sum;
    uint32_t* counters;  // [gridDim.x], zero between launches: pieces of the item whose first CTA this is
};

template <class Config>
struct DecodeShared {
    union Queue {
        uint4 blocks[Config::kStages * Config::kBlockChunks];
        DecodePiece<Config> last;  // once the last block has been used
    };
    Queue queue[Config::kWarps];
    DecodePiece<Config> first[Config::kWarps];
    ScheduleStorage<Config::kThreads> schedule;
    float weights[kMaxDecodeCtas][Config::kRows];  // of the pieces being merged
    float max[Config::kRows], sum[Config::kRows];  // of their rows together
    // Of the items shared with CTAs before and after: those CTAs, and whether this one is the last to arrive.
    struct {
        Item item;
        int32_t first, last;
        bool merge_now;
    } cut[2];

    // What a warp leaves of the first item of its run, and of the last one.
    __device__ DecodePiece<Config>& piece(int index) {
        return index % 2 == 0 ? first[index / 2] : queue[index / 2].last;
    }
};

template <class T, class Config, int kSnap>
class Merge {
  public:
    __device__ Merge(const ForwardParams& p, const DecodePlan& plan, const CtaRuns<kSnap>& runs,
                     int32_t cta_begin, int32_t cta_end, DecodeShared<Config>& shared)
        : p_(p), plan_(plan), runs_(runs), cta_begin_(cta_begin), cta_end_(cta_end), shared_(shared) {}

    // Every thread of the CTA together, once all its warps have left their pieces.
    __device__ void operator()() {
        constexpr int kPieces = 2 * Config::kWarps;
        int cut = 0;  // bit 0: an item from before, bit 1: one that goes on
#pragma unroll 1
        for (int index = 0; index < kPieces;) {
            const Item item = shared_.piece(index).item;
            int next = index + 1;
            if (item.begin >= 0) {
                while (next < kPieces && (!exists(next) || shared_.piece(next).item.begin == item.begin))
                    ++next;
                const bool from_before = item.begin<cta_begin_, goes_on = item.end> cta_end_;
                merge_pieces(item, index, next, from_before ? 0 : (goes_on ? 1 : -1));
                if (from_before || goes_on) {
                    cut |= from_before ? 1 : 2;
                    if (threadIdx.x == 0) shared_.cut[from_before ? 0 : 1].item = item;
                }
            }
            index = next;
        }
        if (cut == 0) return;
        __syncthreads();  // the CTA's partial results are written
        if (threadIdx.x < 2 && (cut >> threadIdx.x & 1)) arrive(threadIdx.x);
        __syncthreads();
#pragma unroll 1
        for (int which = 0; which < 2; ++which) {
            if ((cut >> which & 1) && shared_.cut[which].merge_now) merge_ctas(which);
        }
    }

  private:
    static constexpr int kColumns = Config::kHeadDim / 4;  // groups of four

    __device__ bool exists(int index) const { return shared_.piece(index).item.begin >= 0; }

    // Merges `count` pieces: max_of(i, row) is -inf where there is none, sum_of(i, row), out_of(i, row,
    // column) four columns. Calls emit(row, column, max, sum, out) for each four columns of each row.
    template <class MaxOf, class SumOf, class OutOf, class Emit>
    __device__ void gather(int count, MaxOf max_of, SumOf sum_of, OutOf out_of, Emit emit) {
        const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
        for (int row = warp; row < Config::kRows; row += Config::kWarps) {
            float max = -INFINITY, sum = 0.0f;
            for (int i = lane; i < count; i += 32) max = fmaxf(max, max_of(i, row));
            max = warp_max(max);
            for (int i = lane; i < count; i += 32) {
                const float piece_max = max_of(i, row);
                const float weight = piece_max == -INFINITY ? 0.0f : ptx::exp2_approx(piece_max - max);
                shared_.weights[i][row] = weight;
                if (weight > 0.0f) sum += weight * sum_of(i, row);
            }
            sum = warp_sum(sum);
            if (lane == 0) {
                shared_.max[row] = max;
                shared_.sum[row] = sum;
            }
        }
        __syncthreads();  // weights and totals are there
        for (int i = threadIdx.x; i < Config::kRows * kColumns; i += Config::kThreads) {
            const int row = i / kColumns, column = i % kColumns * 4;
            float4 out = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll 8
            for (int piece = 0; piece < count; ++piece) {
                const float weight = shared_.weights[piece][row];
                const float4 x = out_of(piece, row, column);
                if (weight == 0.0f) continue;
                out.x += weight * x.x;
                out.y += weight * x.y;
                out.z += weight * x.z;
                out.w += weight * x.w;
            }
            emit(row, column, shared_.max[row], shared_.sum[row], out);
        }
        __syncthreads();  // the weights are free again
    }

    // The CTA's pieces `index` to `end` of an item: to its result, or to this CTA's partial slot.
    __device__ void merge_pieces(const Item& item, int index, int end, int slot) {
        gather(
            end - index,
            [&](int i, int row) { return exists(index + i) ? shared_.piece(index + i).max[row] : -INFINITY; },
            [&](int i, int row) { return shared_.piece(index + i).sum[row]; },
            [&](int i, int row, int column) {
                return *reinterpret_cast<const float4*>(&shared_.piece(index + i).out[row][column]);
            },
            [&](int row, int column, float max, float sum, float4 out) {
                if (slot < 0) return store(item, row, column, max, sum, out);
                const int32_t slot_row = (2 * static_cast<int32_t>(blockIdx.x) + slot) * Config::kRows + row;
                *reinterpret_cast<float4*>(plan_.partial_out + slot_row * Config::kHeadDim + column) = out;
                if (column == 0) {
                    plan_.partial_max[slot_row] = max;
                    plan_.partial_sum[slot_row] = sum;
                }
            });
    }

    // Tells the other CTAs of a cut item that this one's piece is there, and finds whether it is the last.
    __device__ void arrive(int which) {
        auto& cut = shared_.cut[which];
        cut.first = runs_.first(cut.item);
        cut.last = runs_.last(cut.item);
        const uint32_t others = cut.last - cut.first;
        uint32_t arrived;
        // Release: what this CTA wrote; acquire: what the others did. Wraps to zero with the last piece.
        asm volatile("atom.acq_rel.gpu.global.inc.u32 %0, [%1], %2;"
                     : "=r"(arrived)
                     : "l"(plan_.counters + cut.first), "r"(others)
                     : "memory");
        cut.merge_now = arrived == others;
    }

    // The partial results of every CTA of a cut item, in their order, to its result.
    __device__ void merge_ctas(int which) {
        const Item item = shared_.cut[which].item;
        const int32_t first = shared_.cut[which].first, last = shared_.cut[which].last;
        auto slot_row = [&](int i, int row) {
            return (2 * (first + i) + (i == 0 ? 1 : 0)) * Config::kRows + row;
        };
        gather(
            last - first + 1, [&](int i, int row) { return __ldcg(plan_.partial_max + slot_row(i, row)); },
            [&](int i, int row) { return __ldcg(plan_.partial_sum + slot_row(i, row)); },
            [&](int i, int row, int column) {
                const float* const out = plan_.partial_out + slot_row(i, row) * Config::kHeadDim + column;
                return __ldcg(reinterpret_cast<const float4*>(out));
            },
            [&](int row, int column, float max, float sum, float4 out) {
                store(item, row, column, max, sum, out);
            });
    }

    __device__ void store(const Item& item, int32_t row, int32_t column, float max, float sum, float4 out) {
        const SequenceSlice seq = SequenceSlice::make(p_, item.sequence);
        const DecodeRow place(seq, plan_.group_size, item.kv_head, row);
        if (!place.valid || column >= p_.head_dim) return;
        const SoftmaxState state{max, sum};
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
    const CtaRuns<kSnap>& runs_;
    int32_t cta_begin_, cta_end_;
    DecodeShared<Config>& shared_;
};

}  // namespace octavo::cuda
