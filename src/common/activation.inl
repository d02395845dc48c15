// The activations of linear layers, on a float or on a vector of floats. Include this file inside the
// namespace of the code that computes them, so that it is compiled for the same machine, after a definition
// of
//     T exp(T), T divide(T, T),
// of which exp has to be right for arguments within [-kMostExponent, kMostExponent], divide for divisors from
// 1 to 1 + e^kMostExponent (a finite number divided by a larger one may be 0), and both have to keep NaN.

constexpr float kMostExponent = 87.0f;

// e to the power of x, cut to the bounds: beyond them, x changes no result here by more than 2^-120.
template <class T>
OCTAVO_HD T bounded_exp(T x) {
    const T bounded = x > kMostExponent ? T{} + kMostExponent : x;
    return exp(bounded < -kMostExponent ? T{} - kMostExponent : bounded);
}

// x / (1 + e^-x).
template <class T>
OCTAVO_HD T silu(T x) {
    const T result = divide(x, 1.0f + bounded_exp(-x));
    return x < -kMostExponent ? T{} : result;
}

// x Phi(x) with the normal distribution's Phi, which is x (1 + erf(x / sqrt(2))) / 2: the exact gelu, not the
// approximation by tanh. With z = |x| / sqrt(2) and t = 1 / (1 + z / 2), Phi(-|x|) = t / 2 exp(p(t) - z^2) to
// a relative error of 6e-8, besides that of rounding.
template <class T>
OCTAVO_HD T gelu(T x) {
    const T z = 0.70710678f * (x < 0.0f ? -x : x);
    const T t = divide(T{} + 1.0f, 1.0f + 0.5f * z);
    T p = T{} + 0.15790595f;
    p = p * t - 0.75146301f;
    p = p * t + 1.32281339f;
    p = p * t - 0.91695978f;
    p = p * t + 0.1018095f;
    p = p * t - 0.09509729f;
    p = p * t + 0.0671851f;
    p = p * t + 0.37988183f;
    p = p * t + 0.99940998f;
    p = p * t - 1.26548561f;
    const T tail = 0.5f * t * bounded_exp(p - z * z);
    const T result = x * (x < 0.0f ? tail : 1.0f - tail);
    return x < -kMostExponent ? T{} : result;
}
