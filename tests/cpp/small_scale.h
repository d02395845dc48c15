// Tests on a small scale, for compute-sanitizer's racecheck: it follows every access to shared memory, which
// then takes some thousand times as long. With OCTAVO_SMALL_SCALE in the environment, plans are made as if
// the GPU had eight SMs, and tests of decoding bring problems of about as small a part of their size. So
// batches are shared out as on a whole GPU, by the same kernels and policies: several CTAs to an item and
// several items to a CTA.
#pragma once

#include "cuda/backend.h"
#include "cuda/runtime.h"

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <vector>

namespace octavo {

constexpr int32_t kSmallScaleSms = 8;

inline bool is_small_scale() {
    static const bool is_small = std::getenv("OCTAVO_SMALL_SCALE") != nullptr;
    return is_small;
}

// Before main, since plans ask for the GPU but once.
inline const bool plans_for_few_sms = [] {
    if (is_small_scale()) cuda::plan_for_sms(kSmallScaleSms);
    return is_small_scale();
}();

// SMs that plans are made for.
inline int32_t num_sms() { return cuda::gpu_of(0).num_sms; }

// What follows is for problems made for 132 SMs, and changes nothing on the usual scale.

// KV heads: more than there are SMs stay more than there are.
inline int64_t scaled_heads(int64_t num_kv_heads) {
    if (!is_small_scale()) return num_kv_heads;
    return num_kv_heads > 16 ? (num_kv_heads * kSmallScaleSms + 131) / 132
                             : std::min<int64_t>(num_kv_heads, 2);
}

// Keys of the longest sequence of a batch: enough for several fixed splits.
constexpr int32_t kManyKeys = 530;

// Of a length above `enough` a quarter, but no less than that, and no more than 1300.
inline int32_t scaled_length(int32_t length, int32_t enough = kManyKeys) {
    if (!is_small_scale() || length <= enough) return length;
    return std::max(std::min(length / 4, 1300), enough + length % 16);
}

// Lengths of a batch with so many KV heads: of many sequences a few, among them the longest one, to which
// `enough` belongs.
inline std::vector<int32_t> scaled_batch(const std::vector<int32_t>& lengths, int64_t num_kv_heads,
                                         int32_t enough = kManyKeys) {
    if (!is_small_scale() || lengths.empty()) return lengths;
    const auto batch = static_cast<int64_t>(lengths.size());
    // No more than are many on so few SMs.
    const int64_t items =
        std::min<int64_t>(batch * num_kv_heads * kSmallScaleSms / 132, 4 * kSmallScaleSms + 4);
    const int64_t wanted = items / scaled_heads(num_kv_heads);
    const int64_t count = std::clamp<int64_t>(wanted, std::min<int64_t>(batch, 3), batch);
    std::vector<int32_t> scaled;
    for (int64_t i = 0; i < count; ++i) scaled.push_back(scaled_length(lengths[i * batch / count], 130));
    const auto longest = std::max_element(lengths.begin(), lengths.end());
    scaled[(longest - lengths.begin()) * count / batch] = scaled_length(*longest, enough);
    return scaled;
}

}  // namespace octavo
