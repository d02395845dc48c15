// Vectors of kLanes floats, in gcc's vector extension (clang knows it too). Included inside the namespace of
// one instruction set, after kLanes. Comparisons give lanes of 0 and -1; `mask ? a : b` selects.

typedef float Vec __attribute__((vector_size(kLanes * 4)));
typedef int32_t IntVec __attribute__((vector_size(kLanes * 4)));
typedef uint32_t BitsVec __attribute__((vector_size(kLanes * 4)));
typedef uint16_t HalfVec __attribute__((vector_size(kLanes * 2)));
typedef int8_t ByteVec __attribute__((vector_size(kLanes)));
typedef uint8_t UnsignedByteVec __attribute__((vector_size(kLanes)));

#define OCTAVO_SIMD static inline __attribute__((always_inline))

template <class V>
OCTAVO_SIMD V load_as(const void* from) {
    V v;
    __builtin_memcpy(&v, from, sizeof v);
    return v;
}

OCTAVO_SIMD Vec load(const float* from) { return load_as<Vec>(from); }

// The first n lanes; the others are 0.
OCTAVO_SIMD Vec load_first(const void* from, int n) {
    Vec v{};
    __builtin_memcpy(&v, from, n * sizeof(float));
    return v;
}

template <class V>
OCTAVO_SIMD void store(void* to, V v) {
    __builtin_memcpy(to, &v, sizeof v);
}

OCTAVO_SIMD Vec broadcast(float x) { return x - Vec{}; }

// Lane l of the result is lane Pick::lane(l) of a followed by b.
template <class Pick, class V, std::size_t... lane>
OCTAVO_SIMD V shuffle(V a, V b, std::index_sequence<lane...>) {
#ifdef __clang__
    return __builtin_shufflevector(a, b, Pick::lane(lane)...);
#else
    return __builtin_shuffle(a, b, decltype(a < b){Pick::lane(lane)...});
#endif
}

template <class Pick, class V>
OCTAVO_SIMD V shuffle(V a, V b) {
    return shuffle<Pick>(a, b, std::make_index_sequence<sizeof(V) / sizeof(float)>{});
}

template <int distance>
struct Rotate {
    static constexpr int lane(int l) { return (l + distance) % kLanes; }
};

template <int distance = kLanes / 2>
OCTAVO_SIMD float sum_of_lanes(Vec v) {
    if constexpr (distance == 0)
        return v[0];
    else
        return sum_of_lanes<distance / 2>(v + shuffle<Rotate<distance>>(v, v));
}

template <int distance = kLanes / 2>
OCTAVO_SIMD float max_of_lanes(Vec v) {
    if constexpr (distance == 0) {
        return v[0];
    } else {
        Vec other = shuffle<Rotate<distance>>(v, v);
        return max_of_lanes<distance / 2>(other > v ? other : v);
    }
}

// Swaps the off-diagonal blocks of a 2 x 2 matrix of blocks of `size` lanes: rows a and b lie `size` apart.
template <int size, int lanes = kLanes>
struct UpperBlocks {
    static constexpr int lane(int l) { return l & size ? lanes + l - size : l; }
};
template <int size, int lanes = kLanes>
struct LowerBlocks {
    static constexpr int lane(int l) { return l & size ? lanes + l : l + size; }
};

template <int size = kLanes / 2>
OCTAVO_SIMD void transpose(Vec (&rows)[kLanes]) {
    if constexpr (size > 0) {
#pragma GCC unroll 16
        for (int i = 0; i < kLanes; ++i) {
            if (i & size) continue;
            Vec a = rows[i], b = rows[i + size];
            rows[i] = shuffle<UpperBlocks<size>>(a, b);
            rows[i + size] = shuffle<LowerBlocks<size>>(a, b);
        }
        transpose<size / 2>(rows);
    }
}

// 2^x for x <= 127, to 2 ulp; 0 below -126. NaN stays NaN.
OCTAVO_SIMD Vec exp2(Vec x) {
    constexpr float kRound = 12582912.0f;  // 1.5 * 2^23: adding it leaves the integer in the low bits
    Vec rounded = x + kRound;
    Vec f = x - (rounded - kRound);
    IntVec exponent = (IntVec)rounded - (0x4b400000 - 127);
    // Minimax in relative error on [-1/2, 1/2]: 1.9e-9.
    Vec p = broadcast(1.5345811e-4f);
    p = p * f + 1.3399931e-3f;
    p = p * f + 9.618489e-3f;
    p = p * f + 5.5503286e-2f;
    p = p * f + 2.4022646e-1f;
    p = p * f + 6.931472e-1f;
    p = p * f + 1.0f;
    return x < -126.0f ? Vec{} : p * (Vec)(exponent << 23);
}

// Near zero: Cephes' tanhf (S. Moshier).
OCTAVO_SIMD Vec tanh(Vec x) {
    BitsVec sign = (BitsVec)x & 0x80000000u;
    Vec size = (Vec)((BitsVec)x ^ sign);
    Vec z = x * x;
    Vec p = broadcast(-5.70498872745e-3f);
    p = p * z + 2.06390887954e-2f;
    p = p * z - 5.37397155531e-2f;
    p = p * z + 1.33314422036e-1f;
    p = p * z - 3.33332819422e-1f;
    Vec bounded = size > 10.0f ? broadcast(10.0f) : size;
    Vec large = 1.0f - 2.0f / (exp2(bounded * (2.0f * kLog2e)) + 1.0f);
    return size < 0.625f ? p * z * x + x : (Vec)((BitsVec)large ^ sign);
}
