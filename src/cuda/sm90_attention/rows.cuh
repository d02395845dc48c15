// The rows of one consumer warpgroup: where they lie, and which keys they see.
#pragma once

#include "common/score.h"
#include "cuda/sm90_attention/parameters.h"
#include "cuda/sm90_attention/work.cuh"

namespace octavo::cuda {

// This thread's two rows of a warpgroup's 64.
__device__ __forceinline__ int32_t sm90_row(int half) {
    return threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4 + 8 * half;
}

// The token and head of each row, counted from the warpgroup's first. With kKept they are computed once per
// kernel, since nothing hides a division between two row tiles. Without it, where no registers are free to
// keep them in, they are computed at every use.
template <bool kKept>
class Sm90RowPlaces {
  public:
    __device__ explicit Sm90RowPlaces(const Sm90Launch& plan) : plan_(plan) {
        if constexpr (kKept) {
#pragma unroll
            for (int half = 0; half < 2; ++half)
                packed_ |= (sm90_row(half) / plan.heads | sm90_row(half) % plan.heads << 8) << 16 * half;
            asm volatile("" : "+r"(packed_));  // otherwise the compiler divides at every use
        }
    }
    __device__ int32_t token(int half) const {
        return kKept ? packed_ >> 16 * half & 0xff : sm90_row(half) / plan_.heads;
    }
    __device__ int32_t head(int half) const {
        return kKept ? packed_ >> (16 * half + 8) & 0xff : sm90_row(half) % plan_.heads;
    }

  private:
    const Sm90Launch& plan_;
    uint32_t packed_ = 0;  // one byte each
};

// The rows of a warpgroup, and what this thread's two of them see. Element i of the scores is in row
// i / 2 % 2 of the two, at column 8 (i / 4) + i % 2 behind the thread's first.
template <class Config>
struct Sm90Rows {
    static constexpr bool kAlibi = Config::kAlibi;
    bool any;  // whether the warpgroup has a query here
    bool has_window_left;
    int32_t prefix_len;
    // A tile of keys inside [0, prefix_len) or [full_begin, full_end) is visible to every row.
    int32_t full_begin, full_end;
    int32_t begin, end;  // the keys that some row sees lie in [0, prefix_len) and [begin, end)
    // ALiBi, without a term that is the same along a row and so does not change its weights: the bias counts
    // from the first query of the warpgroup. The LSE has to be corrected by `row_bias` (in units of log2(e)).
    int32_t anchor;
    float slope[2] = {};  // in units of scores
    int32_t q_pos[2];     // the rows' places, which symmetric ALiBi counts from
    float row_bias[2] = {};
    int32_t row_end[2];   // keys from here on are hidden from the row,
    uint32_t row_gap[2];  // and so are this many keys right behind the prefix

    template <class Places>
    __device__ Sm90Rows(const AttentionParams& p, const Sm90Launch& plan, const Sm90Work& work, int block,
                        const Places& places, float scale) {
        const Visibility windows = work.visibility<Config>(p);
        const int32_t first_token = work.first_token + block * plan.tokens;
        const int32_t first_q_pos = work.q_pos(first_token);
        const int32_t last_q_pos = work.q_pos(min(first_token + plan.tokens, work.seqlen_q) - 1);
        const auto see = work.with_ranges<Config>(p, windows, first_q_pos, last_q_pos);
        any = first_token < work.seqlen_q;
        anchor = first_q_pos;
        has_window_left = p.window_left >= 0;
        prefix_len = see.prefix_len;
        full_begin = see.window_begin(last_q_pos);
        full_end = see.window_end(first_q_pos);
        begin = see.window_begin(first_q_pos);
        end = see.window_end(last_q_pos);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            q_pos[half] = first_q_pos + places.token(half);
            row_end[half] = max(see.window_end(q_pos[half]), prefix_len);
            row_gap[half] = max(see.window_begin(q_pos[half]) - prefix_len, 0);
            if (!kAlibi && !Config::kSymmetricAlibi) continue;
            const int32_t head = work.first_head + places.head(half);
            const float slope_log2 = p.alibi_slopes[work.batch * p.alibi_batch_stride + head] * kLog2e;
            if (kAlibi) row_bias[half] = alibi_bias(slope_log2, q_pos[half], anchor);
            slope[half] = slope_log2 / scale;
        }
    }

    __device__ bool see_any(int32_t first_key, int32_t keys) const {
        return any && (first_key < prefix_len || (first_key < end && first_key + keys > begin));
    }
    __device__ bool see_all(int32_t first_key, int32_t keys) const {
        // Without branches, which take longer than the comparisons.
        return (first_key + keys <= prefix_len) |
               ((first_key >= full_begin) & (first_key + keys <= full_end));
    }
};

}  // namespace octavo::cuda
