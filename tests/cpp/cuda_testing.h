// What the tests of the CUDA operators share: arrays on both devices, random values, and comparisons.
#pragma once

#include "device_memory.h"
#include "small_scale.h"

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#include <gtest/gtest.h>
#include <octavo/tensor.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <random>
#include <vector>

namespace octavo {

constexpr Device kGpu{DeviceType::cuda, 0};

// Whether the GPU is a Hopper, which alone has sm90_attention.
inline bool is_hopper() {
    int major = 0;
    EXPECT_EQ(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, 0), cudaSuccess);
    return major == 9;
}

inline uint16_t to_bits(float x, DType dtype) {
    if (dtype == DType::float16) return static_cast<__half_raw>(__float2half_rn(x)).x;
    return static_cast<__nv_bfloat16_raw>(__float2bfloat16_rn(x)).x;
}

inline float from_bits(uint16_t bits, DType dtype) {
    if (dtype == DType::float16) return __half2float(__half(__half_raw{bits}));
    return __bfloat162float(__nv_bfloat16(__nv_bfloat16_raw{bits}));
}

// The same values on the host and on the device.
template <class T>
class Mirror {
  public:
    explicit Mirror(std::vector<T> values, ArrayPlace place = ArrayPlace::anywhere)
        : host(std::move(values)), device_(bytes(), place) {
        upload(host);
    }

    std::vector<T> fetch() const {
        std::vector<T> values(host.size());
        EXPECT_EQ(cudaMemcpy(values.data(), device_.data(), bytes(), cudaMemcpyDeviceToHost), cudaSuccess);
        return values;
    }
    void upload(const std::vector<T>& values) const {
        EXPECT_EQ(cudaMemcpy(device_.data(), values.data(), bytes(), cudaMemcpyHostToDevice), cudaSuccess);
    }
    // On both.
    void set(const std::vector<T>& values) {
        host = values;
        upload(values);
    }
    TensorView on_host(DType dtype, std::initializer_list<int64_t> shape) {
        return {host.data(), dtype, shape};
    }
    TensorView on_gpu(DType dtype, std::initializer_list<int64_t> shape) const {
        return {device_.data(), dtype, shape, kGpu};
    }

    std::vector<T> host;

  private:
    size_t bytes() const { return host.size() * sizeof(T); }
    DeviceMemory device_;
};

// Which of its two a call is given.
inline constexpr auto kOnHost = [](auto& mirror, DType dtype, std::initializer_list<int64_t> shape) {
    return mirror.on_host(dtype, shape);
};
inline constexpr auto kOnGpu = [](auto& mirror, DType dtype, std::initializer_list<int64_t> shape) {
    return mirror.on_gpu(dtype, shape);
};

class Random {
  public:
    explicit Random(unsigned seed) : engine_(seed) {}
    template <class T>
    T pick(std::initializer_list<T> choices) {
        return choices.begin()[engine_() % choices.size()];
    }
    bool one_in(unsigned n) { return engine_() % n == 0; }
    int64_t up_to(int64_t n) { return 1 + static_cast<int64_t>(engine_() % n); }
    std::vector<uint16_t> normal(size_t count, DType dtype) {
        std::normal_distribution<float> normal;
        std::vector<uint16_t> bits(count);
        for (uint16_t& b : bits) b = to_bits(normal(engine_), dtype);
        return bits;
    }
    std::vector<uint8_t> blocks(size_t count) {  // of a block mask, of which three in ten are kept
        std::vector<uint8_t> kept(count);
        for (uint8_t& block : kept) block = engine_() % 10 < 3;
        return kept;
    }
    std::mt19937& engine() { return engine_; }

  private:
    std::mt19937 engine_;
};

inline std::vector<uint16_t> nans(size_t count, DType dtype) {
    return std::vector<uint16_t>(count, to_bits(NAN, dtype));
}

inline void expect_close(const std::vector<uint16_t>& gpu, const std::vector<uint16_t>& cpu, DType dtype) {
    // Both round to the dtype once; the GPU also rounds its softmax weights.
    const float relative = dtype == DType::float16 ? 2e-3f : 1.6e-2f;
    for (size_t i = 0; i < gpu.size(); ++i) {
        const float want = from_bits(cpu[i], dtype), got = from_bits(gpu[i], dtype);
        ASSERT_LE(std::fabs(got - want), relative * (1.0f + std::fabs(want))) << "element " << i;
    }
}

inline void expect_close(const std::vector<float>& gpu, const std::vector<float>& cpu) {
    for (size_t i = 0; i < gpu.size(); ++i) {
        if (gpu[i] == cpu[i]) continue;  // -inf too
        ASSERT_LE(std::fabs(gpu[i] - cpu[i]), 1e-4f * (1.0f + std::fabs(cpu[i]))) << "element " << i;
    }
}

// The same of rows of head_dim elements at a stride of `row`, between which nothing was written.
inline void expect_rows_close(const std::vector<uint16_t>& gpu, const std::vector<uint16_t>& cpu, DType dtype,
                              int64_t head_dim, int64_t row) {
    std::vector<uint16_t> gpu_rows, cpu_rows;
    for (size_t i = 0; i < gpu.size(); ++i) {
        if (static_cast<int64_t>(i) % row < head_dim) {
            gpu_rows.push_back(gpu[i]);
            cpu_rows.push_back(cpu[i]);
        } else {
            ASSERT_TRUE(std::isnan(from_bits(gpu[i], dtype))) << "the gap at " << i << " was written";
        }
    }
    expect_close(gpu_rows, cpu_rows, dtype);
}

// The norm of the difference is small beside that of what is wanted.
inline void expect_near(const std::vector<uint16_t>& gpu, const std::vector<uint16_t>& cpu, DType dtype,
                        const char* name) {
    double error = 0.0, size = 0.0;
    for (size_t i = 0; i < gpu.size(); ++i) {
        const double want = from_bits(cpu[i], dtype), difference = from_bits(gpu[i], dtype) - want;
        error += difference * difference;
        size += want * want;
    }
    const double tolerance = dtype == DType::float16 ? 2e-3 : 1.2e-2;  // both round results
    EXPECT_LE(std::sqrt(error), tolerance * std::sqrt(size) + 1e-6) << name;
}

inline std::vector<int32_t> cumulative(const std::vector<int32_t>& lengths) {
    std::vector<int32_t> sums{0};
    for (int32_t length : lengths) sums.push_back(sums.back() + length);
    return sums;
}

inline std::vector<float> slopes_for(int64_t num_heads) {
    std::vector<float> slopes(num_heads);
    for (int64_t h = 0; h < num_heads; ++h) slopes[h] = std::exp2(-8.0f * (h + 1) / num_heads);
    return slopes;
}

inline std::vector<float> sinks_for(int64_t num_heads) {
    std::vector<float> sinks(num_heads);
    for (int64_t h = 0; h < num_heads; ++h)
        sinks[h] = h % 5 == 4 ? -INFINITY : 6.0f * static_cast<float>(h % 4) / 3.0f - 2.0f;
    return sinks;
}

// Bidirectional ranges of sequences of these lengths, [batch, count, 2]: some end behind the last key, some
// have no key, and some touch.
constexpr int32_t kNumRanges = 3;
inline std::vector<int32_t> random_ranges(Random& random, const std::vector<int32_t>& lengths,
                                          int32_t count = kNumRanges) {
    std::vector<int32_t> bounds;
    for (const int32_t length : lengths) {
        std::vector<int32_t> cuts(2 * count);
        for (int32_t& cut : cuts) cut = static_cast<int32_t>(random.up_to(length + 20) - 1);
        std::sort(cuts.begin(), cuts.end());
        if (random.one_in(4)) cuts[2] = cuts[1];
        if (random.one_in(4)) cuts[4] = cuts[5] = 0;
        bounds.insert(bounds.end(), cuts.begin(), cuts.end());
    }
    return bounds;
}

// Masks and biases at random, for either operator.
template <class Args>
void pick_masks(Random& random, Args& args) {
    args.causal = !random.one_in(3);
    if (random.one_in(3)) args.window_left = random.pick({0, 10, 90, 300});
    if (random.one_in(4)) args.softcap = 20.0;
    if (!args.causal && random.one_in(2)) args.window_right = random.pick({0, 2, 60});
    if (args.causal && random.one_in(4)) args.attention_chunk = random.pick({1, 50, 100, 300, 1 << 20});
}

}  // namespace octavo
