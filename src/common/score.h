// From a dot product to the exponent of a softmax weight, once for both backends.
#pragma once

#include "common/macros.h"

#include <cmath>

namespace octavo {

constexpr float kLog2e = 1.4426950408889634f;
constexpr float kLn2 = 0.6931471805599453f;

// Scores are kept in units of log2(e), so that a weight is exp2(score - max).
struct ScoreTransform {
    float inner;  // without softcap: scale * log2(e); with: scale / softcap
    float outer;  // softcap * log2(e)
    bool has_softcap;

    OCTAVO_HD static ScoreTransform make(float scale, float softcap) {
        if (softcap > 0.0f) return {scale / softcap, softcap * kLog2e, true};
        return {scale * kLog2e, 0.0f, false};
    }

    // The result lies within 2^-22 of tanh(x): in an exponent, the absolute error is what counts.
    OCTAVO_HD static float tanh(float x) {
#ifdef __CUDA_ARCH__
        float e;  // exp2f would spend instructions on small results that the 1 below swallows
        asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(e) : "f"(2.0f * kLog2e * x));
        return 1.0f - __fdividef(2.0f, e + 1.0f);
#else
        const float e = exp2f(2.0f * kLog2e * x);
        return 1.0f - 2.0f / (e + 1.0f);
#endif
    }

    // The same for |x| <= kSmall, within 2^-18, without exponentials or divisions.
    static constexpr float kSmall = 0.75f;
    OCTAVO_HD static float tanh_of_small(float x) {
        const float z = x * x;
        float ratio = fmaf(z, -0.03377827f, 0.12577091f);
        ratio = fmaf(z, ratio, -0.33222763f);
        return x * fmaf(z, ratio, 0.9999556f);
    }

    OCTAVO_HD float operator()(float qk) const { return has_softcap ? outer * tanh(qk * inner) : qk * inner; }
};

// ALiBi (Press et al. 2021): -slope * (q_pos - k_pos), in units of log2(e).
OCTAVO_HD float alibi_bias(float slope_log2, int q_pos, int k_pos) {
    return -slope_log2 * static_cast<float>(q_pos - k_pos);
}

}  // namespace octavo
