// Rows of arrays as float32 in scratch memory, and back. Included inside the namespace of one instruction
// set, after simd.inl and its own
//     BitsVec widen(HalfVec), Vec float_of_half(HalfVec), HalfVec half_of_float(Vec).

OCTAVO_SIMD Vec load_lanes(const float* from) { return load(from); }
OCTAVO_SIMD Vec load_lanes(const Float16* from) { return float_of_half(load_as<HalfVec>(from)); }
OCTAVO_SIMD Vec load_lanes(const BFloat16* from) { return (Vec)(widen(load_as<HalfVec>(from)) << 16); }

// float8_to_float of the codes of one format, a byte each in lanes of 32 bits. No lane is ever a subnormal
// float32, with which x86 computes slowly.
template <class Format>
OCTAVO_SIMD Vec float_of_float8(BitsVec codes) {
    const BitsVec sign = (codes & 0x80u) << 24, size = codes & 0x7fu;
    const BitsVec normal = (size << Format::kShift) + ((127u - Format::kBias) << 23);
    const Vec subnormal = (Vec)(size + Format::kGridBits) - float_of_bits(Format::kGridBits);
    const BitsVec finite = size < Format::kSmallestNormal ? (BitsVec)subnormal : normal;
    constexpr bool kHasInfinity = Format::kMaxCode + 1 < Format::kNan;
    const BitsVec infinity = BitsVec{} + (kHasInfinity ? 0x7f800000u : 0x7fc00000u);
    const BitsVec special = size == Format::kMaxCode + 1 ? infinity : BitsVec{} + 0x7fc00000u;
    return (Vec)((size > Format::kMaxCode ? special : finite) | sign);
}

OCTAVO_SIMD Vec load_lanes(const Int8* from) { return __builtin_convertvector(load_as<ByteVec>(from), Vec); }
template <class Float8>
OCTAVO_SIMD Vec load_lanes(const Float8* from) {
    return float_of_float8<typename Float8::Format>(
        __builtin_convertvector(load_as<UnsignedByteVec>(from), BitsVec));
}

OCTAVO_SIMD void store_lanes(float* to, Vec x) { store(to, x); }
OCTAVO_SIMD void store_lanes(Float16* to, Vec x) { store(to, half_of_float(x)); }
OCTAVO_SIMD void store_lanes(BFloat16* to, Vec x) {
    BitsVec bits = (BitsVec)x;
    BitsVec rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    store(to, __builtin_convertvector(x == x ? rounded : (bits >> 16) | 0x40u, HalfVec));
}

template <class T>
static void load_row(const T* from, int n, float* to) {
    int d = 0;
    for (; d + kLanes <= n; d += kLanes) store(to + d, load_lanes(from + d));
    for (; d < n; ++d) to[d] = to_float(from[d]);
}

template <int begin>
struct Interleave {  // takes lanes from `begin` on
    static constexpr int lane(int l) { return (l & 1 ? kLanes : 0) + begin + l / 2; }
};

static void load_row(const Int4Pair* from, int n, float* to) {
    int d = 0;
    for (; d + 2 * kLanes <= n; d += 2 * kLanes) {
        const BitsVec pairs = __builtin_convertvector(load_as<UnsignedByteVec>(from + d / 2), BitsVec);
        const Vec even = __builtin_convertvector((IntVec)(pairs & 0xfu), Vec);
        const Vec odd = __builtin_convertvector((IntVec)(pairs >> 4), Vec);
        store(to + d, shuffle<Interleave<0>>(even, odd));
        store(to + d + kLanes, shuffle<Interleave<kLanes / 2>>(even, odd));
    }
    for (; d < n; ++d) to[d] = static_cast<float>(from[d / 2].pair >> (d & 1 ? 4 : 0) & 0xf);
}

// Vector `vector` of a row, in an order of its own: lanes of bfloat16 have pairs of numbers, first the second
// one, since a vector of pairs becomes two of float32 without a shuffle.
template <int vector>
OCTAVO_SIMD Vec load_in_order(const float* from) {
    return load(from + vector * kLanes);
}
template <int vector>
OCTAVO_SIMD Vec load_in_order(const Float16* from) {
    return load_lanes(from + vector * kLanes);
}
template <int vector>
OCTAVO_SIMD Vec load_in_order(const BFloat16* from) {
    const BitsVec pairs = load_as<BitsVec>(from + vector / 2 * 2 * kLanes);
    return (Vec)(vector % 2 == 0 ? pairs & 0xffff0000u : pairs << 16);
}

struct OddLanes {
    static constexpr int lane(int l) { return 2 * l + 1; }
};
struct EvenLanes {
    static constexpr int lane(int l) { return 2 * l; }
};

// Brings a row of float32 into the order of those of T, and back.
static void arrange(const float*, float*, int64_t) {}
static void arrange(const Float16*, float*, int64_t) {}
static void arrange(const BFloat16*, float* x, int64_t padded) {
    for (int64_t k = 0; k < padded; k += 2 * kLanes) {
        const Vec a = load(x + k), b = load(x + k + kLanes);
        store(x + k, shuffle<OddLanes>(a, b));
        store(x + k + kLanes, shuffle<EvenLanes>(a, b));
    }
}
template <class T>
static void restore(const T*, float*, int64_t) {}
static void restore(const BFloat16*, float* x, int64_t padded) {
    for (int64_t k = 0; k < padded; k += 2 * kLanes) {
        const Vec odd = load(x + k), even = load(x + k + kLanes);
        store(x + k, shuffle<Interleave<0>>(even, odd));
        store(x + k + kLanes, shuffle<Interleave<kLanes / 2>>(even, odd));
    }
}

template <class T>
static void store_row(const float* from, float scale, int n, T* to) {
    int d = 0;
    for (; d + kLanes <= n; d += kLanes) store_lanes(to + d, load(from + d) * scale);
    for (; d < n; ++d) from_float(from[d] * scale, to[d]);
}

// Asks the memory for a row of the next tile. The hardware does not foresee it: pages lie anywhere.
template <class T>
OCTAVO_SIMD void prefetch_numbers(const T* row, int count) {
    const int length = count / kNumbersOf<T>;
    for (int d = 0; d < length; d += 64 / sizeof(T)) __builtin_prefetch(row + d, 0, 2);
}

// One word of each of kLanes keys holds one dim of float32, two of a 16-bit type, four codes of 8 bits or
// eight of 4: each to its own row.
OCTAVO_SIMD void store_dims(const float*, Vec words, float* to) { store(to, words); }
OCTAVO_SIMD void store_dims(const BFloat16*, Vec words, float* to) {
    store(to, (Vec)((BitsVec)words << 16));
    store(to + kTileKeys, (Vec)((BitsVec)words & 0xffff0000u));
}
OCTAVO_SIMD void store_dims(const Float16*, Vec words, float* to) {
    store(to, float_of_half(__builtin_convertvector((BitsVec)words & 0xffffu, HalfVec)));
    store(to + kTileKeys, float_of_half(__builtin_convertvector((BitsVec)words >> 16, HalfVec)));
}

OCTAVO_SIMD void store_dims(const Int8*, Vec words, float* to) {
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i)
        store(to + i * kTileKeys,
              __builtin_convertvector((IntVec)((BitsVec)words << (24 - 8 * i)) >> 24, Vec));
}
template <class Float8>
OCTAVO_SIMD void store_dims(const Float8*, Vec words, float* to) {
    using Format = typename Float8::Format;
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i)
        store(to + i * kTileKeys, float_of_float8<Format>((BitsVec)words >> (8 * i) & 0xffu));
}

OCTAVO_SIMD void store_dims(const Int4Pair*, Vec words, float* to) {
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i)
        store(to + i * kTileKeys, __builtin_convertvector((IntVec)((BitsVec)words >> (4 * i) & 0xfu), Vec));
}

// Loads keys to [head_dim, kTileKeys], transposed word by word.
template <class T>
static void load_keys(const T* const* keys, const T* const* next_keys, int head_dim, float* to) {
    constexpr int kWordElements = sizeof(float) / sizeof(T), kWordDims = kWordElements * kNumbersOf<T>;
    const int num_words = head_dim / kWordDims;
    for (int j = 0; j < kTileKeys; j += kLanes) {
        for (int i = 0; i < kLanes; ++i) prefetch_numbers(next_keys[j + i], head_dim);
        for (int word = 0; word < num_words; word += kLanes) {
            Vec block[kLanes];
#pragma GCC unroll 16
            for (int i = 0; i < kLanes; ++i) {
                const T* from = keys[j + i] + word * kWordElements;
                block[i] =
                    word + kLanes <= num_words ? load_as<Vec>(from) : load_first(from, num_words - word);
            }
            transpose(block);
#pragma GCC unroll 16
            for (int i = 0; i < kLanes; ++i) {
                store_dims(keys[0], block[i], to + (word + i) * kWordDims * kTileKeys + j);
            }
        }
    }
}

// Loads values to [kTileKeys, row_stride(head_dim)].
template <class T>
static void load_values(const T* const* values, const T* const* next_values, int head_dim, float* to) {
    for (int j = 0; j < kTileKeys; ++j, to += row_stride(head_dim)) {
        prefetch_numbers(next_values[j], head_dim);
        load_row(values[j], head_dim, to);
    }
}
