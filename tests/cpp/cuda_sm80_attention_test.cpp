// The forward kernel by itself, with every row of its table, where other kernels would be picked too.
#include "paged_call.h"

#include <octavo/attention.h>
#include <octavo/paged_attention.h>

namespace octavo {
namespace {

// `body(gpu)` for this GPU and for one with so little shared memory that other rows of the table serve.
template <class Body>
void for_each_shared_memory(Body body) {
    cuda::Gpu gpu = cuda::gpu_of(0);
    for (const int64_t shared_bytes : {int64_t{99} << 10, gpu.shared_bytes_per_block}) {
        SCOPED_TRACE(shared_bytes);
        gpu.shared_bytes_per_block = shared_bytes;
        body(gpu);
    }
}

class CudaForwardTest : public ::testing::TestWithParam<unsigned> {};

TEST_P(CudaForwardTest, DenseAndPackedAgreeWithTheCpu) {
    Random random(GetParam());
    const DType dtype = random.pick({DType::float16, DType::bfloat16});
    const int64_t head_dim = random.pick({16, 64, 72, 96, 120, 128, 128, 160, 256});
    const int64_t row = head_dim + random.pick({0, 0, 0, 3, 4});  // some rows lie off every 16-byte boundary
    const int64_t num_kv_heads = random.pick({1, 2}), group_size = random.pick({1, 3, 4, 7, 40});
    const int64_t num_q_heads = num_kv_heads * group_size;
    const bool packed = random.one_in(2);
    const auto lengths_q = packed ? random.pick<std::vector<int32_t>>({{70, 193, 0, 1}, {257, 1, 0, 300}})
                                  : std::vector<int32_t>(2, random.pick({1, 64, 200, 333}));
    const auto lengths_k = packed ? random.pick<std::vector<int32_t>>({{70, 450, 40, 129}, {257, 31, 7, 300}})
                                  : std::vector<int32_t>(2, random.pick({1, 64, 200, 450}));
    const int64_t batch = lengths_q.size();
    Mirror<int32_t> cu_seqlens_q(cumulative(lengths_q)), cu_seqlens_k(cumulative(lengths_k));
    const int64_t total_q = cu_seqlens_q.host.back(), total_k = cu_seqlens_k.host.back();
    Mirror<uint16_t> q(random.normal(total_q * num_q_heads * row, dtype));
    Mirror<uint16_t> k(random.normal(total_k * num_kv_heads * row, dtype));
    Mirror<uint16_t> v(random.normal(k.host.size(), dtype)), out(nans(q.host.size(), dtype));
    Mirror<float> lse(std::vector<float>(total_q * num_q_heads, NAN)), slopes(slopes_for(num_q_heads));
    Mirror<float> sinks(sinks_for(num_q_heads));
    const bool with_sinks = q.host[0] % 3 == 0;
    std::vector<int32_t> prefixes(batch);
    for (int32_t& prefix : prefixes) prefix = random.pick({0, 3, 140});
    Mirror<int32_t> prefix_lens(prefixes);

    AttentionArgs args;
    pick_masks(random, args);
    if (random.one_in(8)) args.softmax_scale = random.pick({-0.1, 0.0});
    if (random.one_in(3)) {
        args.dropout_p = random.pick({0.1, 0.5});
        args.dropout_seed = GetParam() + (int64_t{1} << 40);
        args.dropout_offset = (int64_t{1} << 32) - 3;
    }
    const bool with_alibi = random.one_in(3), with_prefix = random.one_in(4), with_blocks = random.one_in(3);
    args.block_size = random.pick({64, 128});
    auto blocks_of = [&](int64_t total) {
        return ((packed ? total : total / batch) + args.block_size - 1) / args.block_size;
    };
    const int64_t q_blocks = blocks_of(total_q), k_blocks = blocks_of(total_k);
    const int64_t mask_heads = random.pick<int64_t>({1, num_q_heads});
    Mirror<uint8_t> blocks(random.blocks(mask_heads * q_blocks * k_blocks));
    auto set = [&](AttentionArgs& a, auto view) {
        auto tokens_of = [&](auto& mirror, int64_t total, int64_t heads) {
            TensorView tokens = packed ? view(mirror, dtype, {total, heads, row})
                                       : view(mirror, dtype, {batch, total / batch, heads, row});
            tokens.shape[tokens.ndim - 1] = head_dim;
            return tokens;
        };
        a.q = tokens_of(q, total_q, num_q_heads);
        a.out = tokens_of(out, total_q, num_q_heads);
        a.k = tokens_of(k, total_k, num_kv_heads);
        a.v = tokens_of(v, total_k, num_kv_heads);
        a.lse = packed ? view(lse, DType::float32, {total_q, num_q_heads})
                       : view(lse, DType::float32, {batch, total_q / batch, num_q_heads});
        if (packed) {
            a.cu_seqlens_q = view(cu_seqlens_q, DType::int32, {batch + 1});
            a.cu_seqlens_k = view(cu_seqlens_k, DType::int32, {batch + 1});
        }
        if (with_alibi) a.alibi_slopes = view(slopes, DType::float32, {num_q_heads});
        if (with_sinks) a.sinks = view(sinks, DType::float32, {num_q_heads});
        if (with_blocks) a.block_mask = view(blocks, DType::uint8, {mask_heads, q_blocks, k_blocks});
        if (with_prefix) a.prefix_lens = view(prefix_lens, DType::int32, {batch});
    };
    set(args, kOnHost);
    attention(args);
    set(args, kOnGpu);
    for_each_shared_memory([&](const cuda::Gpu& gpu) {
        out.upload(nans(out.host.size(), dtype));
        lse.upload(std::vector<float>(lse.host.size(), NAN));
        const AttentionParams params = check_attention(args);
        cuda::run(params, cuda::plan_sm80_attention(params, gpu), nullptr);
        ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
        expect_rows_close(out.fetch(), out.host, dtype, head_dim, row);  // gaps stay NaN
        expect_close(lse.fetch(), lse.host);
    });
}

TEST_P(CudaForwardTest, PagedAgreesWithTheCpu) {
    Random random(GetParam());
    const DType dtype = random.pick({DType::float16, DType::bfloat16});
    const int64_t num_kv_heads = random.pick({1, 2}), group_size = random.pick({1, 3, 4, 8});
    const int64_t head_dim = random.pick({64, 96, 128, 128, 160, 256});
    // Decode rows and chunks in one batch.
    const std::vector<int32_t> lengths_q{1, 200, 1, 64, 130, 0}, lengths_k{700, 270, 1, 64, 390, 5};
    Cache cache(random, lengths_k, random.pick({1, 8, 17, 16, 256}), num_kv_heads, head_dim, dtype);
    PagedCall call(random, cache, lengths_q, num_kv_heads * group_size, dtype);
    pick_masks(random, call.options);
    if (random.one_in(2)) call.options.num_splits = random.pick({1, 3, 7});
    call.with_alibi = random.one_in(3);
    call.run_on_cpu();
    for_each_shared_memory([&](const cuda::Gpu& gpu) {
        auto plan_of = [&gpu](const AttentionParams& p, const cuda::Gpu&, std::string*) {
            return std::optional(cuda::plan_sm80_attention(p, gpu));
        };
        call.expect_right([&](const PagedAttentionArgs& args) { run_by(plan_of, args); });
    });
}

INSTANTIATE_TEST_SUITE_P(Seeds, CudaForwardTest, ::testing::Range(0u, 48u));

}  // namespace
}  // namespace octavo
