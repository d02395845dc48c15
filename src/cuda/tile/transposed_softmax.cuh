// One warp's online softmax over S^T = K Q^T in the fragments of mma.sync, and its accumulators of O^T = V^T
// P^T. Keys are on the 16-wide side and rows on the 8-wide side, so that eight rows waste nothing. An 8 x 8
// transposition turns the accumulators of S^T into operand b of the second product.
//
// Four rows are on the 8-wide side twice, and each lane keeps the scores of one of its two keys, so that all
// lanes weigh scores that count. Lanes are those of mma.sync, lane 4 g + t, and one transposition serves 16
// keys in place of 8:
//
//     8 rows   lane 4 g + t has rows 2t, 2t + 1 of keys g and g + 8
//     4 rows   t = 0, 1: rows 2t, 2t + 1 of key g; t = 2, 3: rows 2t - 4, 2t - 3 of key g + 8
//
// In the second product, columns 0 to 3 then have the weights of keys 0 to 7, and columns 4 to 7 those of
// keys 8 to 15: two partial sums of each row, which are added up behind the last block.
#pragma once

#include "common/macros.h"
#include "common/online_softmax.h"
#include "cuda/ptx/exp2.h"
#include "cuda/ptx/movmatrix.h"
#include "cuda/types.h"

namespace octavo::cuda {

// Tells weigh() that each row has a maximum of its own.
struct NoUnifiedMax {
    __device__ static constexpr bool given() { return false; }
    __device__ float operator()(float max, int, int) const { return max; }
};

// The softmax over blocks of kSteps times 16 keys. A lane has rows row_of(lane, r, 0) and row_of(lane, r, 1)
// of each tile r, and keys lane / 4 and lane / 4 + 8: scores[r][e] is row row_of(lane, r, e % 2), key
// key_of(lane, e). Scores are in units of log2(e); weights are exp2(score - max). kHasOffset: each value has
// an offset, or all have one in common. kFourRows: there are four rows, as described above; a lane has one of
// the keys, and `out` has partial sums until sum_out_over_keys().
template <int kRowTiles, int kDimTiles, int kSteps = 1, bool kHasOffset = false, bool kFourRows = false>
struct TransposedSoftmax {
    static_assert(!kFourRows || (kRowTiles == 1 && kDimTiles % 2 == 0));
    static constexpr int kLaneKeys = kFourRows ? 1 : 2;  // of each 16 keys, those of a lane
    static constexpr int kLaneScores = 2 * kLaneKeys;    // of each tile
    // The tiles of dims of which a lane has sums. With four rows, lanes t = 0, 1 have the even ones behind
    // sum_out_over_keys(), and t = 2, 3 the odd ones.
    static constexpr int kOwnDimTiles = kFourRows ? kDimTiles / 2 : kDimTiles;

    float max[kRowTiles][2];
    float sum[kRowTiles][2];  // of the weights; over this lane's keys alone until sum_over_keys(r, i)
    float offset[kHasOffset ? kRowTiles : 1][2];  // the sum of the weighted offsets, likewise
    float out[kRowTiles][kDimTiles][4];           // O^T, see for_each_out

    __device__ static int row_of(int lane, int r, int i) {
        return 8 * r + 2 * (lane % (kFourRows ? 2 : 4)) + i;
    }
    __device__ static int key_of(int lane, int e) { return lane / 4 + 8 * (kFourRows ? upper(lane) : e / 2); }
    // The tile of dims of out[r][d], behind sum_out_over_keys().
    __device__ static int dim_tile_of(int lane, int d) { return kFourRows ? 2 * d + upper(lane) : d; }

    // Takes a lane's scores from the accumulators of S^T.
    __device__ static void take(float (&scores)[kRowTiles][kLaneScores],
                                const float (&products)[kRowTiles][4]) {
#pragma unroll
        for (int r = 0; r < kRowTiles; ++r) {
#pragma unroll
            for (int e = 0; e < kLaneScores; ++e)
                scores[r][e] = kFourRows && upper() ? products[r][e + 2] : products[r][e];
        }
    }

    template <class Body>
    __device__ static void for_each_row(Body body) {
#pragma unroll
        for (int r = 0; r < kRowTiles; ++r) {
            body(r, 0);
            body(r, 1);
        }
    }
    // Calls body(score, r, e).
    template <class Body>
    __device__ static void for_each_score(float (&scores)[kRowTiles][kLaneScores], Body body) {
#pragma unroll
        for (int r = 0; r < kRowTiles; ++r) {
#pragma unroll
            for (int e = 0; e < kLaneScores; ++e) body(scores[r][e], r, e);
        }
    }
    // Calls body(out, r, dim, i): `out` is column dim + lane / 4 of the output of row row_of(lane, r, i).
    template <class Body>
    __device__ void for_each_out(Body body) {
#pragma unroll
        for (int r = 0; r < kRowTiles; ++r) {
#pragma unroll
            for (int d = 0; d < kDimTiles; ++d) {
#pragma unroll
                for (int e = 0; e < 4; ++e) body(out[r][d][e], r, 16 * d + 8 * (e / 2), e % 2);
            }
        }
    }
    // The same for one row: body(out, dim).
    template <class Body>
    __device__ void for_each_out_of(int r, int i, Body body) {
#pragma unroll
        for (int d = 0; d < kDimTiles; ++d) {
            body(out[r][d][i], 16 * d);
            body(out[r][d][i + 2], 16 * d + 8);
        }
    }

    __device__ void reset() {
        for_each_row([&](int r, int i) {
            max[r][i] = -INFINITY;
            sum[r][i] = 0.0f;
            if (kHasOffset) offset[r][i] = 0.0f;
        });
        for_each_out([](float& out, int, int, int) { out = 0.0f; });
    }

    // Turns the scores of a block into weights, rounded to T: operand b of the second product. kFromZero:
    // where the first block allows it, the maximum starts at zero, so that most partial results can be added
    // without rescaling (the unified maximum of FlashDecoding++, Hong et al. 2024). unified.given(): the
    // caller has a unified maximum, and unified(max, r, i) returns what takes the place of a row's own.
    // add(weight, rounded, step, r, e) has to add a weight to the sums; `rounded` is the weight after
    // rounding to T.
    template <class T, bool kFromZero = false, class Add, class Unified = NoUnifiedMax>
    __device__ __forceinline__ void weigh(uint32_t (&weights)[kSteps][kRowTiles][2],
                                          float (&scores)[kSteps][kRowTiles][kLaneScores], Add add,
                                          Unified unified = {}) {
        bool raise = false;
#pragma unroll
        for (int step = 0; step < kSteps; ++step) {
            for_each_score(scores[step], [&](float& score, int r, int e) {
                raise = raise || score > max[r][e % 2] + kSlackLog2;
            });
        }
        if (__any_sync(~0u, raise) && !(kFromZero && !unified.given() && starts_from_zero(scores))) {
            float raised[kRowTiles][2];
            for_each_row([&](int r, int i) {
                raised[r][i] = fmaxf(max[r][i], max_over_keys(max_of_lane(scores, r, i)));
            });
            if (OCTAVO_RARE(unified.given()))
                for_each_row([&](int r, int i) { raised[r][i] = unified(raised[r][i], r, i); });
            for_each_row([&](int r, int i) {
                const float factor =
                    raised[r][i] == -INFINITY ? 1.0f : ptx::exp2_approx(max[r][i] - raised[r][i]);
                max[r][i] = raised[r][i];
                sum[r][i] *= factor;
                if (kHasOffset) offset[r][i] *= factor;
                for_each_out_of(r, i, [&](float& out, int) { out *= factor; });
            });
        }
#pragma unroll
        for (int step = 0; step < kSteps; ++step) {
            for_each_score(scores[step], [&](float& score, int r, int e) {
                const float row_max = max[r][e % 2];
                score = ptx::exp2_approx(score - (row_max == -INFINITY ? 0.0f : row_max));
            });
#pragma unroll
            for (int r = 0; r < kRowTiles; ++r) {
#pragma unroll
                for (int i = 0; i < kLaneKeys; ++i) {
                    const float low = scores[step][r][2 * i], high = scores[step][r][2 * i + 1];
                    const uint32_t pair = pack<T>(low, high);
                    const float2 rounded = unpack<T>(pair);
                    add(low, rounded.x, step, r, 2 * i);
                    add(high, rounded.y, step, r, 2 * i + 1);
                    weights[step][r][i] = ptx::transpose_8x8(pair);
                }
                if constexpr (kFourRows) {  // lanes of columns 4 to 7 have the weights of keys 8 to 15
                    const bool of_upper_keys = threadIdx.x % 32 >= 16;
                    weights[step][r][1] = of_upper_keys ? weights[step][r][0] : 0;
                    weights[step][r][0] = of_upper_keys ? 0 : weights[step][r][0];
                }
            }
        }
    }
    // The same for one step; the weights are added to `sum` before they are rounded.
    template <class T>
    __device__ __forceinline__ void weigh(uint32_t (&weights)[kRowTiles][2], float (&scores)[kRowTiles][4]) {
        static_assert(kSteps == 1);
        weigh<T>(reinterpret_cast<uint32_t (&)[1][kRowTiles][2]>(weights),
                 reinterpret_cast<float (&)[1][kRowTiles][4]>(scores),
                 [&](float weight, float, int, int r, int e) { sum[r][e % 2] += weight; });
    }

    // Call it after the last block: makes the sum of row i of tile r complete, in all lanes that share it.
    __device__ void sum_over_keys(int r, int i) { sum_over_keys(sum[r][i]); }
    __device__ void sum_offset_over_keys(int r, int i) { sum_over_keys(offset[r][i]); }
    // Likewise for `out`; with four rows, lanes keep half of it each (kOwnDimTiles).
    __device__ void sum_out_over_keys() {
        if constexpr (kFourRows) {
#pragma unroll
            for (int d = 0; d < kOwnDimTiles; ++d) {
#pragma unroll
                for (int e = 0; e < 4; ++e) {
                    const float even = out[0][2 * d][e], odd = out[0][2 * d + 1][e];
                    const float others = __shfl_xor_sync(~0u, upper() ? even : odd, 2);
                    out[0][d][e] = (upper() ? odd : even) + others;
                }
            }
        }
    }

  private:
    // With four rows: 1 in lanes that keep the upper one of their keys, otherwise 0.
    __device__ static int upper(int lane = threadIdx.x % 32) { return lane % 4 / 2; }

    // With a maximum lower than this, weights of fp16 would lose bits of keys that count.
    static constexpr float kSlackBelowZeroLog2 = 2.0f;

    // Before the first block: returns whether the maximum of each row is so near to zero that zero can take
    // its place, and if so, puts zero there.
    __device__ bool starts_from_zero(const float (&scores)[kSteps][kRowTiles][kLaneScores]) {
        bool within = true;
        for_each_row([&](int r, int i) {
            const float row_max = max_of_lane(scores, r, i);
            const uint32_t lanes_of_row =
                kFourRows ? 0x55555555u << threadIdx.x % 2 : 0x11111111u << threadIdx.x % 4;
            const uint32_t near = __ballot_sync(~0u, row_max >= -kSlackBelowZeroLog2) & lanes_of_row;
            within = within && max[r][i] == -INFINITY && row_max <= kSlackLog2 && near != 0;
        });
        if (!__all_sync(~0u, within)) return false;
        for_each_row([&](int r, int i) { max[r][i] = 0.0f; });
        return true;
    }

    // The largest score of this lane's keys.
    __device__ static float max_of_lane(const float (&scores)[kSteps][kRowTiles][kLaneScores], int r, int i) {
        float largest = scores[0][r][i];
#pragma unroll
        for (int at = 1; at < kSteps * kLaneKeys; ++at)
            largest = fmaxf(largest, scores[at / kLaneKeys][r][at % kLaneKeys * 2 + i]);
        return largest;
    }
    // Sums over the lanes that share rows.
    __device__ static void sum_over_keys(float& x) {
#pragma unroll
        for (int step = 2 * kLaneKeys; step < 32; step *= 2) x += __shfl_xor_sync(~0u, x, step);
    }
    __device__ static float max_over_keys(float x) {
#pragma unroll
        for (int step = 2 * kLaneKeys; step < 32; step *= 2) x = fmaxf(x, __shfl_xor_sync(~0u, x, step));
        return x;
    }
};

}  // namespace octavo::cuda
