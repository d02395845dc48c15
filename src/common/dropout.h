// Which softmax weights dropout drops: a pure function of the seed, the offset and the place of the weight,
// so that a backward pass finds the same mask again, whatever its tiles.
#pragma once

#include "common/macros.h"

#include <cstdint>

namespace octavo {

// 128 random bits for each counter: Philox 4x32-7 (Salmon et al. 2011, "Parallel random numbers: as easy as
// 1, 2, 3"), the fewest rounds that pass all tests of the paper; ten take 1.4 times as long.
struct Philox {
    uint32_t words[4];

    OCTAVO_HD static Philox make(uint32_t c0, uint32_t c1, uint64_t c23, uint64_t key) {
        constexpr uint32_t kMultiplier0 = 0xd2511f53, kMultiplier1 = 0xcd9e8d57;
        constexpr uint32_t kWeyl0 = 0x9e3779b9, kWeyl1 = 0xbb67ae85;
        constexpr int kRounds = 7;
        uint32_t c2 = static_cast<uint32_t>(c23), c3 = static_cast<uint32_t>(c23 >> 32);
        uint32_t key0 = static_cast<uint32_t>(key), key1 = static_cast<uint32_t>(key >> 32);
        for (int round = 0; round < kRounds; ++round, key0 += kWeyl0, key1 += kWeyl1) {
            const uint64_t product0 = multiply(kMultiplier0, c0), product1 = multiply(kMultiplier1, c2);
            c0 = static_cast<uint32_t>(product1 >> 32) ^ c1 ^ key0;
            c1 = static_cast<uint32_t>(product1);
            c2 = static_cast<uint32_t>(product0 >> 32) ^ c3 ^ key1;
            c3 = static_cast<uint32_t>(product0);
        }
        return {{c0, c1, c2, c3}};
    }

  private:
    OCTAVO_HD static uint64_t multiply(uint32_t a, uint32_t b) {
#ifdef __CUDA_ARCH__
        uint64_t product;  // for uint64_t{a} * b, nvcc would add up the upper halves too, which are zero
        asm("mul.wide.u32 %0, %1, %2;" : "=l"(product) : "r"(a), "r"(b));
        return product;
#else
        return uint64_t{a} * b;
#endif
    }
};

// 16 random bits decide on a weight: the weight of query i and key j of a sequence (both counted from the
// sequence's first) is dropped if the bits are below `threshold`. One Philox counter serves eight keys of a
// query, those that lie in one lane's registers after an m16n8k16 or wgmma product: with x = 4 (j / 32) + j %
// 8 / 2,
//
//     counter = (x, i, offset + batch index * num_q_heads + query head), the last of 64 bits; key = seed
//     bits    = 16 bits of word j / 8 % 4, the low ones for even j, the high ones for odd j
//
// 8 bits per weight would need half of the numbers, but could not tell apart two p that differ by less than
// 1/256.
struct Dropout {
    uint64_t seed;
    uint64_t offset;     // each head of each sequence takes one number from here on
    uint32_t threshold;  // p * 2^16, rounded; 0: nothing is dropped

    static constexpr double kLimit = 1.0 - 0.5 / 65536.0;  // of p: from here on, it rounds to 1

    // Requires 0 <= p < kLimit.
    static Dropout make(double p, uint64_t seed, uint64_t offset) {
        return {seed, offset, static_cast<uint32_t>(p * 65536.0 + 0.5)};
    }

    OCTAVO_HD bool any() const { return threshold != 0; }
    OCTAVO_HD uint64_t head(int32_t batch_index, int32_t num_q_heads, int32_t q_head) const {
        return offset + static_cast<uint64_t>(batch_index) * static_cast<uint64_t>(num_q_heads) +
               static_cast<uint64_t>(q_head);
    }

    // The bits for the eight keys 32 n + 8 w + 2 pair and the next, w in [0, 4), of one query of one head().
    OCTAVO_HD Philox bits(uint64_t head, int32_t query, int32_t n, int32_t pair) const {
        return Philox::make(4 * static_cast<uint32_t>(n) + static_cast<uint32_t>(pair),
                            static_cast<uint32_t>(query), head, seed);
    }
    // Whether one word of those bits drops its even key, or its odd one.
    OCTAVO_HD bool drops_even(uint32_t word) const { return word << 16 < threshold << 16; }
    OCTAVO_HD bool drops_odd(uint32_t word) const { return word < threshold << 16; }
};

}  // namespace octavo
