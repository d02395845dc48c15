// Problems for the tests of plans: shapes without values, which need no GPU.
#pragma once

#include "checks/checks.h"
#include "cuda/attention/plan.h"
#include "cuda/gpu.h"
#include "explain_testing.h"

#include <octavo/explain.h>

#include <gtest/gtest.h>

#include <algorithm>
#include <initializer_list>
#include <optional>
#include <random>
#include <string>

namespace octavo {

using cuda::AttentionPlan;
using cuda::Gpu;
using cuda::KernelPlan;

// Arrays of shapes alone, each at an address of its own that is a multiple of 4096.
class Arrays {
  public:
    TensorView make(DType dtype, std::initializer_list<int64_t> shape) {
        address_ += uintptr_t{1} << 46;
        return {reinterpret_cast<void*>(address_), dtype, shape, {DeviceType::meta, 0}};
    }

  private:
    uintptr_t address_ = 0;
};

struct Shape {
    int64_t batch = 1, keys = 1024;  // of each sequence at most
    int64_t num_kv_heads = 8, group_size = 4, head_dim = 128;
    int64_t page_size = 16;  // paged
    int64_t queries = 1;     // of each sequence at most; more than one are packed where keys are paged
    int64_t total_q = 0;     // packed; 0: batch * queries
    DType dtype = DType::bfloat16;
    int64_t value_dim = 0;  // the head dim of values; 0: head_dim

    int64_t head_dim_v() const { return value_dim > 0 ? value_dim : head_dim; }
};

inline PagedAttentionArgs paged(const Shape& shape) {
    Arrays arrays;
    const int64_t max_pages = (shape.keys + shape.page_size - 1) / shape.page_size;
    const int64_t total_q = shape.total_q > 0 ? shape.total_q : shape.batch * shape.queries;
    const int64_t num_q_heads = shape.num_kv_heads * shape.group_size;
    PagedAttentionArgs args;
    args.q = arrays.make(shape.dtype, {total_q, num_q_heads, shape.head_dim});
    args.out = arrays.make(shape.dtype, {total_q, num_q_heads, shape.head_dim_v()});
    auto pages_of = [&](int64_t head_dim) {
        return arrays.make(shape.dtype,
                           {shape.batch * max_pages, shape.page_size, shape.num_kv_heads, head_dim});
    };
    args.k_pages = pages_of(shape.head_dim);
    args.v_pages = pages_of(shape.head_dim_v());
    args.page_table = arrays.make(DType::int32, {shape.batch, max_pages});
    args.seq_lens = arrays.make(DType::int32, {shape.batch});
    if (shape.queries > 1 || shape.total_q > 0) {
        args.cu_seqlens_q = arrays.make(DType::int32, {shape.batch + 1});
        args.max_seqlen_q = shape.queries;
    }
    return args;
}

inline AttentionArgs dense(const Shape& shape) {
    Arrays arrays;
    const int64_t num_q_heads = shape.num_kv_heads * shape.group_size;
    AttentionArgs args;
    args.q = arrays.make(shape.dtype, {shape.batch, shape.queries, num_q_heads, shape.head_dim});
    args.out = arrays.make(shape.dtype, {shape.batch, shape.queries, num_q_heads, shape.head_dim_v()});
    args.k = arrays.make(shape.dtype, {shape.batch, shape.keys, shape.num_kv_heads, shape.head_dim});
    args.v = arrays.make(shape.dtype, {shape.batch, shape.keys, shape.num_kv_heads, shape.head_dim_v()});
    args.causal = true;
    return args;
}

inline AttentionArgs packed(const Shape& shape) {
    Arrays arrays;
    const int64_t total_q = shape.total_q > 0 ? shape.total_q : shape.batch * shape.queries;
    const int64_t num_q_heads = shape.num_kv_heads * shape.group_size;
    AttentionArgs args;
    args.q = arrays.make(shape.dtype, {total_q, num_q_heads, shape.head_dim});
    args.out = arrays.make(shape.dtype, {total_q, num_q_heads, shape.head_dim_v()});
    args.k = arrays.make(shape.dtype, {shape.batch * shape.keys, shape.num_kv_heads, shape.head_dim});
    args.v = arrays.make(shape.dtype, {shape.batch * shape.keys, shape.num_kv_heads, shape.head_dim_v()});
    args.cu_seqlens_q = arrays.make(DType::int32, {shape.batch + 1});
    args.cu_seqlens_k = arrays.make(DType::int32, {shape.batch + 1});
    args.max_seqlen_q = shape.queries;
    args.max_seqlen_k = shape.keys;
    args.causal = true;
    return args;
}

inline AttentionParams checked(const AttentionArgs& args) { return check_attention(args); }
inline AttentionParams checked(const PagedAttentionArgs& args) { return check_paged_attention(args); }

template <class Args>
AttentionPlan plan_of(const Args& args, const char* gpu = "h200") {
    return cuda::plan_attention(checked(args), *cuda::find_gpu(gpu));
}

template <class Args>
std::string kind_of(const Args& args, const char* gpu = "h200") {
    return kind_of(explain(args, gpu));
}

// Why an H200 does not run a kernel.
template <class Args>
std::string why_not(const Args& args, const std::string& kernel) {
    for (const auto& [name, reason] : explain(args, "h200").why_not) {
        if (name == kernel) return reason;
    }
    return "it serves";
}

// ---- random problems

class Random {
  public:
    explicit Random(unsigned seed) : engine_(seed) {}
    int64_t pick(std::initializer_list<int64_t> choices) {
        return choices.begin()[engine_() % choices.size()];
    }
    bool one_in(unsigned n) { return engine_() % n == 0; }
    int64_t up_to(int64_t n) { return 1 + static_cast<int64_t>(engine_() % n); }

  private:
    std::mt19937 engine_;
};

inline Shape random_shape(Random& random) {
    Shape shape;
    shape.dtype = random.one_in(2) ? DType::float16 : DType::bfloat16;
    shape.head_dim =
        random.one_in(4) ? 8 * random.up_to(40) : random.pick({64, 64, 96, 128, 128, 192, 256, 512});
    shape.num_kv_heads = random.one_in(8) ? random.up_to(200) : random.pick({1, 2, 4, 8, 8, 16});
    shape.group_size = random.one_in(8) ? random.up_to(64) : random.pick({1, 2, 3, 4, 5, 8, 8, 16});
    shape.batch =
        random.one_in(8) ? random.up_to(3000) : random.pick({1, 1, 2, 3, 8, 20, 32, 33, 64, 150, 256});
    shape.keys =
        random.one_in(3) ? random.up_to(40000) : random.pick({16, 100, 200, 512, 640, 1024, 2048, 8192});
    shape.page_size = random.one_in(6) ? random.up_to(300) : random.pick({1, 8, 16, 16, 32, 64, 128, 256});
    return shape;
}

// The same call over pages of some codes, at the same addresses.
inline void set_random_codes(Random& random, PagedAttentionArgs& args) {
    auto set_pages = [&](TensorView& pages, std::optional<TensorView>& scales, DType dtype, bool has_scales) {
        pages.dtype = dtype == DType::int4 ? DType::uint8 : dtype;
        if (dtype == DType::int4) pages.shape[3] /= 2;
        if (!has_scales) return;
        const int64_t num_pages = pages.shape[0], page_size = pages.shape[1], num_heads = pages.shape[2];
        scales = dtype == DType::int4 ? Arrays().make(DType::float16, {num_pages, page_size, num_heads, 2})
                                      : Arrays().make(DType::float32, {num_pages, page_size, num_heads});
    };
    DType keys = DType::int8, values = DType::int4;
    if (random.one_in(3)) {
        keys = DType::int4;
    } else if (random.one_in(2)) {
        constexpr DType kTypes[] = {DType::int8, DType::float8_e4m3fn, DType::float8_e5m2};
        keys = values = kTypes[random.up_to(3) - 1];
    }
    if (values == DType::int4) args.kv_dtype = DType::int4;
    const bool has_scales = values == DType::int4 || random.one_in(2);
    if (!has_scales) args.k_scale = args.v_scale = 0.5f;
    set_pages(args.k_pages, args.k_scales, keys, has_scales);
    set_pages(args.v_pages, args.v_scales, values, has_scales);
}

template <class Args>
void set_random_ranges(Random& random, Args& args, int64_t batch) {
    args.bidirectional_ranges = Arrays().make(DType::int32, {batch, random.pick({0, 1, 5}), 2});
    args.ranges_keep_window_left = random.one_in(2);
}

inline PagedAttentionArgs random_paged(Random& random, bool batch_invariant) {
    Shape shape = random_shape(random);
    if (random.one_in(4)) shape.value_dim = random.pick({40, 64, 72, 128, 128, 256, 512});
    if (random.one_in(2)) {
        shape.queries = random.one_in(2) ? random.up_to(16) : random.pick({64, 128, 200, 500, 2048});
        if (shape.queries > 16) shape.batch = std::min<int64_t>(shape.batch, 64);
        shape.total_q =
            random.one_in(2) ? shape.batch * shape.queries : random.up_to(shape.batch * shape.queries);
    }
    PagedAttentionArgs args = paged(shape);
    args.causal = !random.one_in(4);
    args.batch_invariant = batch_invariant;
    if (random.one_in(5)) args.window_left = random.pick({0, 100, 1000, 4000});
    if (random.one_in(6)) args.prefix_lens = Arrays().make(DType::int32, {shape.batch});
    if (random.one_in(6)) {
        args.alibi_slopes = Arrays().make(DType::float32, {shape.num_kv_heads * shape.group_size});
        args.alibi_symmetric = random.one_in(3);
    } else if (!batch_invariant && args.window_left < 0 && random.one_in(6)) {
        args.shared_prefix_len = (shape.keys / 2 / shape.page_size) * shape.page_size;
    }
    if (random.one_in(12)) args.num_splits = random.up_to(40);
    if (!args.causal && random.one_in(3)) args.window_right = random.pick({0, 3, 1000});
    if (args.causal && args.shared_prefix_len == 0 && random.one_in(16))
        args.attention_chunk = random.pick({1, 100, 8192});
    if (std::max(shape.head_dim, shape.head_dim_v()) <= kMaxCudaCodeHeadDim && random.one_in(2))
        set_random_codes(random, args);
    if (args.causal && random.one_in(4)) {
        args.tree_mask = Arrays().make(DType::int64, {args.q.shape[0]});
    } else if (args.shared_prefix_len == 0 && random.one_in(8)) {
        set_random_ranges(random, args, shape.batch);
    }
    if (random.one_in(5)) args.softcap = 30.0;
    return args;
}

inline AttentionArgs random_dense_or_packed(Random& random) {
    Shape shape = random_shape(random);
    shape.batch = std::min<int64_t>(shape.batch, 200);
    if (random.one_in(4)) shape.value_dim = random.pick({40, 64, 72, 128, 128, 256, 512});
    shape.queries =
        random.one_in(3) ? random.up_to(5000) : random.pick({1, 64, 128, 192, 200, 512, 1024, 4096});
    const bool is_packed = random.one_in(2);
    if (is_packed && random.one_in(2)) shape.total_q = random.up_to(shape.batch * shape.queries);
    AttentionArgs args = is_packed ? packed(shape) : dense(shape);
    args.causal = !random.one_in(3);
    if (random.one_in(5)) args.window_left = random.pick({0, 100, 1000, 4000});
    if (random.one_in(5)) {
        args.alibi_slopes = Arrays().make(DType::float32, {shape.num_kv_heads * shape.group_size});
        args.alibi_symmetric = random.one_in(3);
    }
    if (random.one_in(5)) {
        args.dropout_p = 0.1;
        args.dropout_seed = 1;
    }
    if (random.one_in(4)) {
        args.block_size = random.pick({64, 128});
        auto blocks = [&](std::optional<int64_t> bound, const TensorView& tokens) {
            const int64_t length = bound.value_or(tokens.shape[is_packed ? 0 : 1]);
            return (length + args.block_size - 1) / args.block_size;
        };
        args.block_mask = Arrays().make(
            DType::uint8, {1, blocks(args.max_seqlen_q, args.q), blocks(args.max_seqlen_k, args.k)});
    } else if (random.one_in(8)) {
        set_random_ranges(random, args, shape.batch);
    }
    if (random.one_in(5)) args.softcap = 30.0;
    return args;
}

}  // namespace octavo
