// What the tests of the CUDA operators share: arrays on both devices, and random problems in which unused
// pages, unused slots and outputs hold NaN, unused page table entries huge ids.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#include <gtest/gtest.h>
#include <octavo/explain.h>
#include <octavo/paged_attention.h>
#include <octavo/tensor.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <numeric>
#include <optional>
#include <random>
#include <string>
#include <variant>
#include <vector>

namespace octavo {

constexpr Device kGpu{DeviceType::cuda, 0};

// The kernel that a call reaches on its GPU, without the instance: "split_kv_decode". A test that means one
// kernel expects it, so that another choice does not silently test something else.
template <class Args>
std::string kind_of(const Args& args) {
    const std::string kernel = explain(args).kernel;
    return kernel.substr(0, kernel.find('<'));
}

// A field of its plan, which is a text.
template <class Args>
std::string planned(const Args& args, const std::string& field) {
    for (const auto& [name, value] : explain(args).plan) {
        if (name == field) return std::get<std::string>(value);
    }
    return "no " + field;
}

inline int32_t num_sms() {
    int count = 0;
    EXPECT_EQ(cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, 0), cudaSuccess);
    return count;
}

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
    explicit Mirror(std::vector<T> values) : host(std::move(values)) {
        EXPECT_EQ(cudaMalloc(&device_, std::max<size_t>(bytes(), 1)), cudaSuccess);
        EXPECT_EQ(cudaMemcpy(device_, host.data(), bytes(), cudaMemcpyHostToDevice), cudaSuccess);
    }
    ~Mirror() { cudaFree(device_); }
    Mirror(const Mirror&) = delete;

    std::vector<T> fetch() const {
        std::vector<T> values(host.size());
        EXPECT_EQ(cudaMemcpy(values.data(), device_, bytes(), cudaMemcpyDeviceToHost), cudaSuccess);
        return values;
    }
    void upload(const std::vector<T>& values) const {
        EXPECT_EQ(cudaMemcpy(device_, values.data(), bytes(), cudaMemcpyHostToDevice), cudaSuccess);
    }
    TensorView on_host(DType dtype, std::initializer_list<int64_t> shape) {
        return {host.data(), dtype, shape};
    }
    TensorView on_gpu(DType dtype, std::initializer_list<int64_t> shape) const {
        return {device_, dtype, shape, kGpu};
    }

    std::vector<T> host;

  private:
    size_t bytes() const { return host.size() * sizeof(T); }
    T* device_ = nullptr;
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
    std::vector<uint16_t> normal(size_t count, DType dtype) {
        std::normal_distribution<float> normal;
        std::vector<uint16_t> bits(count);
        for (uint16_t& b : bits) b = to_bits(normal(engine_), dtype);
        return bits;
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

// A paged cache of random lengths on shuffled pages.
struct Cache {
    Cache(Random& random, std::vector<int32_t> lengths, int64_t page_size, int64_t num_kv_heads,
          int64_t head_dim, DType dtype)
        : lengths(std::move(lengths)), page_size(page_size), num_kv_heads(num_kv_heads), head_dim(head_dim) {
        batch = static_cast<int64_t>(this->lengths.size());
        int64_t used = 0;
        max_pages = 1;
        for (int32_t length : this->lengths) {
            const int64_t pages = (length + page_size - 1) / page_size;
            used += pages;
            max_pages = std::max(max_pages, pages + 1);
        }
        num_pages = used + 5;
        std::vector<int32_t> ids(num_pages);
        std::iota(ids.begin(), ids.end(), 0);
        std::shuffle(ids.begin(), ids.end(), random.engine());
        table.assign(batch * max_pages, 1 << 30);
        const int64_t slot_size = num_kv_heads * head_dim;
        k = nans(num_pages * page_size * slot_size, dtype);
        v = k;
        size_t next = 0;
        for (int64_t b = 0; b < batch; ++b) {
            for (int64_t position = 0; position < this->lengths[b]; ++position) {
                int32_t& page = table[b * max_pages + position / page_size];
                if (position % page_size == 0) page = ids[next++];
                const int64_t at = (page * page_size + position % page_size) * slot_size;
                const auto new_k = random.normal(slot_size, dtype), new_v = random.normal(slot_size, dtype);
                std::copy(new_k.begin(), new_k.end(), k.begin() + at);
                std::copy(new_v.begin(), new_v.end(), v.begin() + at);
            }
        }
    }

    std::vector<int32_t> lengths, table;
    int64_t page_size, num_kv_heads, head_dim;
    int64_t batch = 0, max_pages = 0, num_pages = 0;
    std::vector<uint16_t> k, v;
};

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

// Masks and biases at random, for either operator.
template <class Args>
void pick_masks(Random& random, Args& args) {
    args.causal = !random.one_in(3);
    if (random.one_in(3)) args.window_left = random.pick({0, 10, 90, 300});
    if (random.one_in(4)) args.softcap = 20.0;
}

// A sequence of a batch as a batch of its own, of the tokens of `q` from the first on that it has; the caller
// gives its outputs, and cu_seqlens_q unless that begins like the batch's.
inline PagedAttentionArgs alone(PagedAttentionArgs args, int64_t sequence, int64_t first_token,
                                int64_t num_tokens) {
    auto cut = [](TensorView& view, int64_t begin, int64_t count) {
        view.data = static_cast<char*>(view.data) + begin * view.strides[0] * size_of(view.dtype);
        view.shape[0] = count;
    };
    cut(args.q, first_token, num_tokens);
    cut(args.page_table, sequence, 1);
    cut(args.seq_lens, sequence, 1);
    if (args.cu_seqlens_q) args.cu_seqlens_q->shape[0] = 2;
    return args;
}

// Random queries over a cache, with outputs full of NaN, for either device.
struct PagedCall {
    PagedCall(Random& random, const Cache& cache, const std::vector<int32_t>& lengths_q, int64_t num_q_heads,
              DType dtype)
        : dtype(dtype),
          batch(cache.batch),
          num_q_heads(num_q_heads),
          head_dim(cache.head_dim),
          begins(cumulative(lengths_q)),
          pages_shape{cache.num_pages, cache.page_size, cache.num_kv_heads, cache.head_dim},
          max_pages(cache.max_pages),
          cu_seqlens_q(begins),
          table(cache.table),
          lengths(cache.lengths),
          q(random.normal(total_q() * num_q_heads * head_dim, dtype)),
          k(cache.k),
          v(cache.v),
          out(nans(q.host.size(), dtype)),
          lse(std::vector<float>(total_q() * num_q_heads, NAN)),
          slopes(slopes_for(num_q_heads)) {}

    int64_t total_q() const { return begins.back(); }

    // `view`: kOnHost or kOnGpu.
    template <class View>
    PagedAttentionArgs arguments(View view) {
        const auto [num_pages, page_size, num_kv_heads, head_dim] = pages_shape;
        PagedAttentionArgs args = options;
        args.q = view(q, dtype, {total_q(), num_q_heads, head_dim});
        args.out = view(out, dtype, {total_q(), num_q_heads, head_dim});
        if (with_lse) args.lse = view(lse, DType::float32, {total_q(), num_q_heads});
        args.k_pages = view(k, dtype, {num_pages, page_size, num_kv_heads, head_dim});
        args.v_pages = view(v, dtype, {num_pages, page_size, num_kv_heads, head_dim});
        args.page_table = view(table, DType::int32, {batch, max_pages});
        args.seq_lens = view(lengths, DType::int32, {batch});
        if (packed) args.cu_seqlens_q = view(cu_seqlens_q, DType::int32, {batch + 1});
        if (prefix_lens) args.prefix_lens = view(*prefix_lens, DType::int32, {batch});
        if (with_alibi) args.alibi_slopes = view(slopes, DType::float32, {num_q_heads});
        return args;
    }
    void poison_outputs() {
        out.upload(nans(out.host.size(), dtype));
        lse.upload(std::vector<float>(lse.host.size(), NAN));
    }
    void run_on_gpu() {
        poison_outputs();
        paged_attention(arguments(kOnGpu));
        ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
    }
    void expect_what_the_cpu_gives() {
        paged_attention(arguments(kOnHost));
        expect_close(out.fetch(), out.host, dtype);
        if (with_lse) expect_close(lse.fetch(), lse.host);
    }

    PagedAttentionArgs options;  // without arrays
    bool packed = true, with_alibi = false, with_lse = true;
    const DType dtype;
    const int64_t batch, num_q_heads, head_dim;
    const std::vector<int32_t> begins;  // of each sequence's queries
    const std::array<int64_t, 4> pages_shape;
    const int64_t max_pages;
    Mirror<int32_t> cu_seqlens_q, table, lengths;
    Mirror<uint16_t> q, k, v, out;
    Mirror<float> lse, slopes;
    std::optional<Mirror<int32_t>> prefix_lens;
};

}  // namespace octavo
