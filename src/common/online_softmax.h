// The state of an online softmax (Milakov and Gimelshein 2018; FlashAttention), and how two partial results
// combine.
#pragma once

#include "common/macros.h"
#include "common/score.h"

#include <cmath>

namespace octavo {

// The CUDA kernels raise a maximum only when a score passes it by this much, in units of log2(e): it only has
// to keep weights from overflowing, and sums are then seldom scaled.
constexpr float kSlackLog2 = 8.0f;

// Of the scores seen so far, in units of log2(e): their maximum, and the sum of exp2(score - max).
struct SoftmaxState {
    float max = -INFINITY;
    float sum = 0.0f;

    // Raises the maximum to at least `score_max`; returns the factor that earlier sums must be multiplied by.
    OCTAVO_HD float raise(float score_max) {
        if (!(score_max > max)) return 1.0f;
        float factor = exp2f(max - score_max);  // 0 from -inf
        max = score_max;
        sum *= factor;
        return factor;
    }

    // Call it once all scores were seen. Adds an attention sink: one more score, without a value. Returns the
    // factor that the output's sums must be multiplied by. A sink of -inf is none.
    OCTAVO_HD float add_sink(float sink_log2) {
        if (sink_log2 == -INFINITY) return 1.0f;
        if (sum == 0.0f) max = -INFINITY;  // where nothing was seen, kernels may hold another maximum
        const float factor = raise(sink_log2);
        sum += exp2f(sink_log2 - max);
        return factor;
    }

    // The maximum to subtract. It is finite even while nothing was seen, so that exp2 never gets inf - inf.
    OCTAVO_HD float safe_max() const { return max == -INFINITY ? 0.0f : max; }

    // 1 / sum, or 0 for an empty row, whose output is 0.
    OCTAVO_HD float inverse_sum() const { return sum == 0.0f ? 0.0f : 1.0f / sum; }

    // Natural logarithm of the sum of exponentials; -inf for an empty row.
    OCTAVO_HD float lse() const { return sum == 0.0f ? -INFINITY : (max + log2f(sum)) * kLn2; }
};

// The unified maximum of FlashDecoding++ (Hong et al. 2024), in units of log2(e): it may stand for the
// maximum of a row, so that partial results of the row have a maximum in common. It does so where the row's
// maximum lies in a window around it; any other row keeps its own.
struct UnifiedMax {
    float phi, below, above;

    // Upwards, the window ends where kernels raise a maximum that a score passes, at 2^8: otherwise they
    // would look again at every such score. Downwards, weights of float16 keep their bits down to 2^-14, so
    // that keys 2^-12 below the maximum still count. Weights of other types have the exponents of float32,
    // and the window ends where sums are still far from its end.
    OCTAVO_HD static UnifiedMax of_float16(float phi) { return {phi * kLog2e, 2.0f, 8.0f}; }
    OCTAVO_HD static UnifiedMax of_wide(float phi) { return {phi * kLog2e, 60.0f, 8.0f}; }

    // Returns what takes the place of `max`, the maximum of the scores seen so far. A phi that is not finite
    // takes the place of none.
    OCTAVO_HD float operator()(float max) const {
        return max >= phi - below && max <= phi + above ? phi : max;
    }
};

// What a query adds to the gradient of its head's sink: the sink's weight times minus `delta`, the dot
// product of the gradient of the output with the output, less the gradient of the LSE.
OCTAVO_HD float sink_gradient(float sink, float lse, float delta) {
    return sink == -INFINITY ? 0.0f : -expf(sink - lse) * delta;
}

// How two normalised partial results combine: out = a * out_a + b * out_b. An attention sink is a partial
// result whose LSE is the sink, and whose output is 0.
struct MergeWeights {
    float a, b, lse;

    OCTAVO_HD static MergeWeights make(float lse_a, float lse_b) {
        if (lse_a == -INFINITY && lse_b == -INFINITY) return {0.0f, 0.0f, -INFINITY};
        float max = lse_a > lse_b ? lse_a : lse_b;
        float weight_a = expf(lse_a - max), weight_b = expf(lse_b - max);
        float sum = weight_a + weight_b;
        return {weight_a / sum, weight_b / sum, max + logf(sum)};
    }

    // A side that weighs nothing, such as an empty one, counts as zero, whatever it holds.
    OCTAVO_HD float merge(float from_a, float from_b) const {
        return (a == 0.0f ? 0.0f : a * from_a) + (b == 0.0f ? 0.0f : b * from_b);
    }
};

}  // namespace octavo
