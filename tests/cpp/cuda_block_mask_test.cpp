// Block-sparse attention by the kernel that the plan picks: the GPU against the CPU.
#include "cuda_testing.h"

#include <octavo/attention.h>
#include <octavo/explain.h>

#include <tuple>

namespace octavo {
namespace {

class CudaBlockMaskTest : public ::testing::TestWithParam<std::tuple<int64_t, int64_t, bool, unsigned>> {};

TEST_P(CudaBlockMaskTest, AgreesWithTheCpu) {
    const auto [head_dim, block_size, packed, seed] = GetParam();
    Random random(seed);
    const DType dtype = random.pick({DType::float16, DType::bfloat16});
    const int64_t num_kv_heads = random.pick({1, 2}), group_size = random.pick({1, 3, 4});
    const int64_t num_q_heads = num_kv_heads * group_size;
    const auto lengths_q = packed ? std::vector<int32_t>{300, 0, 1, 129, 640}
                                  : std::vector<int32_t>(2, random.pick({1, 64, 200, 700}));
    const auto lengths_k = packed ? std::vector<int32_t>{450, 40, 900, 129, 500}
                                  : std::vector<int32_t>(2, random.pick({64, 333, 4500}));
    const int64_t batch = static_cast<int64_t>(lengths_q.size());
    Mirror<int32_t> cu_q(cumulative(lengths_q)), cu_k(cumulative(lengths_k));
    const int64_t total_q = cu_q.host.back(), total_k = cu_k.host.back();
    Mirror<uint16_t> q(random.normal(total_q * num_q_heads * head_dim, dtype));
    Mirror<uint16_t> k(random.normal(total_k * num_kv_heads * head_dim, dtype));
    Mirror<uint16_t> v(random.normal(k.host.size(), dtype)), out(nans(q.host.size(), dtype));
    Mirror<float> lse(std::vector<float>(total_q * num_q_heads, NAN)), sinks(sinks_for(num_q_heads));
    AttentionArgs args;
    pick_masks(random, args);
    args.block_size = block_size;
    if (packed) args.max_seqlen_q = 640, args.max_seqlen_k = 900;
    const int64_t q_blocks = ((packed ? 640 : lengths_q[0]) + block_size - 1) / block_size;
    const int64_t k_blocks = ((packed ? 900 : lengths_k[0]) + block_size - 1) / block_size;
    const bool with_batch = random.one_in(3), with_sinks = random.one_in(3);
    const int64_t mask_heads = random.pick<int64_t>({1, num_q_heads});
    Mirror<uint8_t> blocks(random.blocks((with_batch ? batch : 1) * mask_heads * q_blocks * k_blocks));
    auto set = [&](auto on) {
        auto tokens = [&](auto& x, int64_t total, int64_t heads) {
            return packed ? on(x, dtype, {total, heads, head_dim})
                          : on(x, dtype, {batch, total / batch, heads, head_dim});
        };
        args.q = tokens(q, total_q, num_q_heads);
        args.out = tokens(out, total_q, num_q_heads);
        args.k = tokens(k, total_k, num_kv_heads);
        args.v = tokens(v, total_k, num_kv_heads);
        args.lse = packed ? on(lse, DType::float32, {total_q, num_q_heads})
                          : on(lse, DType::float32, {batch, total_q / batch, num_q_heads});
        if (packed) {
            args.cu_seqlens_q = on(cu_q, DType::int32, {batch + 1});
            args.cu_seqlens_k = on(cu_k, DType::int32, {batch + 1});
        }
        args.block_mask = with_batch ? on(blocks, DType::uint8, {batch, mask_heads, q_blocks, k_blocks})
                                     : on(blocks, DType::uint8, {mask_heads, q_blocks, k_blocks});
        if (with_sinks) args.sinks = on(sinks, DType::float32, {num_q_heads});
    };
    set(kOnHost);
    attention(args);
    set(kOnGpu);
    if (is_hopper() && head_dim <= 128) {
        EXPECT_EQ(explain(args).kernel.find("sm90_attention"), 0u) << explain(args).kernel;
    }
    attention(args);
    ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
    expect_close(out.fetch(), out.host, dtype);
    expect_close(lse.fetch(), lse.host);
}

INSTANTIATE_TEST_SUITE_P(All, CudaBlockMaskTest,
                         ::testing::Combine(::testing::Values(40, 64, 96, 128, 192),
                                            ::testing::Values(64, 128), ::testing::Bool(),
                                            ::testing::Range(0u, 6u)));

}  // namespace
}  // namespace octavo
