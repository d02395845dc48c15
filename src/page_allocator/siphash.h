// SipHash-1-3 with 128 bits out (Aumasson and Bernstein 2012, "SipHash: a fast short-input PRF"): a keyed
// hash whose collisions nobody can make without the key.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

namespace octavo {

struct Hash128 {
    uint64_t low = 0, high = 0;

    friend bool operator==(Hash128 a, Hash128 b) { return a.low == b.low && a.high == b.high; }
};

// Takes `prefix` and then `size` bytes.
inline Hash128 siphash13(Hash128 key, Hash128 prefix, const void* bytes, size_t size) {
    uint64_t v0 = key.low ^ 0x736f6d6570736575u, v1 = key.high ^ 0x646f72616e646f6du ^ 0xee;
    uint64_t v2 = key.low ^ 0x6c7967656e657261u, v3 = key.high ^ 0x7465646279746573u;
    auto rotate = [](uint64_t x, int bits) { return x << bits | x >> (64 - bits); };
    auto round = [&] {
        v0 += v1, v2 += v3;
        v1 = rotate(v1, 13) ^ v0, v3 = rotate(v3, 16) ^ v2;
        v0 = rotate(v0, 32);
        v2 += v1, v0 += v3;
        v1 = rotate(v1, 17) ^ v2, v3 = rotate(v3, 21) ^ v0;
        v2 = rotate(v2, 32);
    };
    auto absorb = [&](uint64_t word) {
        v3 ^= word;
        round();
        v0 ^= word;
    };
    auto squeeze = [&] {
        for (int i = 0; i < 3; ++i) round();
        return v0 ^ v1 ^ v2 ^ v3;
    };
    absorb(prefix.low);
    absorb(prefix.high);
    const auto* next = static_cast<const unsigned char*>(bytes);
    size_t left = size;
    for (; left >= 8; left -= 8, next += 8) {
        uint64_t word;
        std::memcpy(&word, next, 8);
        absorb(word);
    }
    uint64_t last = static_cast<uint64_t>(size + sizeof prefix) << 56;
    for (size_t i = 0; i < left; ++i) last |= static_cast<uint64_t>(next[i]) << (8 * i);
    absorb(last);
    v2 ^= 0xee;
    Hash128 hash;
    hash.low = squeeze();
    v1 ^= 0xdd;
    hash.high = squeeze();
    return hash;
}

}  // namespace octavo
