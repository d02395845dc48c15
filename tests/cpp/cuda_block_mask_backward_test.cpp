// The gradients of block-sparse attention over many tiles: the GPU against the CPU.
#include "cuda_testing.h"

#include <octavo/attention.h>
#include <octavo/explain.h>

#include <algorithm>
#include <tuple>

namespace octavo {
namespace {

// The seed picks everything else.
class CudaBlockMaskBackwardTest
    : public ::testing::TestWithParam<std::tuple<int64_t, int64_t, bool, unsigned>> {};

TEST_P(CudaBlockMaskBackwardTest, AgreesWithTheCpu) {
    const auto [head_dim, block_size, packed, seed] = GetParam();
    Random random(seed);
    const DType dtype = random.pick({DType::float16, DType::bfloat16});
    const int64_t num_kv_heads = random.pick({1, 2}), group_size = random.pick({1, 3});
    const int64_t num_q_heads = num_kv_heads * group_size;
    const auto lengths_q = packed ? std::vector<int32_t>{300, 0, 1, 129, 640}
                                  : std::vector<int32_t>(2, random.pick({1, 64, 200, 700}));
    const auto lengths_k = packed ? std::vector<int32_t>{450, 40, 900, 129, 500}
                                  : std::vector<int32_t>(2, random.pick({64, 333, 700, 2900}));
    const int64_t batch = static_cast<int64_t>(lengths_q.size());
    Mirror<int32_t> cu_q(cumulative(lengths_q)), cu_k(cumulative(lengths_k));
    const int64_t total_q = cu_q.host.back(), total_k = cu_k.host.back();
    Mirror<int32_t> prefix(std::vector<int32_t>(batch, 70));
    AttentionArgs masks;
    pick_masks(random, masks);
    const bool with_prefix = masks.causal && masks.attention_chunk == 0 && random.one_in(3);
    const bool with_sinks = random.one_in(3), with_batch = random.one_in(3);
    const int64_t mask_heads = random.pick<int64_t>({1, num_q_heads});
    const int64_t q_blocks = ((packed ? 640 : lengths_q[0]) + block_size - 1) / block_size;
    const int64_t k_blocks = ((packed ? 900 : lengths_k[0]) + block_size - 1) / block_size;
    Mirror<uint8_t> blocks(random.blocks((with_batch ? batch : 1) * mask_heads * q_blocks * k_blocks));

    // Keys of blocks at which no query looks are never used.
    std::vector<uint16_t> keys = random.normal(total_k * num_kv_heads * head_dim, dtype);
    std::vector<uint16_t> values = random.normal(keys.size(), dtype);
    for (int64_t b = 0; b < batch; ++b) {
        for (int64_t kv_head = 0; kv_head < num_kv_heads; ++kv_head) {
            for (int32_t key = 0; key < lengths_k[b]; ++key) {
                bool used = false;
                for (int64_t h = 0; h < (mask_heads == 1 ? 1 : group_size); ++h) {
                    const int64_t head = mask_heads == 1 ? 0 : kv_head * group_size + h;
                    for (int64_t row = 0; row * block_size < lengths_q[b]; ++row) {
                        const int64_t place = ((with_batch ? b : 0) * mask_heads + head) * q_blocks + row;
                        used |= blocks.host[place * k_blocks + key / block_size] != 0;
                    }
                }
                if (used) continue;
                const int64_t first = ((cu_k.host[b] + key) * num_kv_heads + kv_head) * head_dim;
                std::fill_n(keys.begin() + first, head_dim, to_bits(NAN, dtype));
                std::fill_n(values.begin() + first, head_dim, to_bits(NAN, dtype));
            }
        }
    }
    Mirror<uint16_t> k(keys), v(values), dk(nans(keys.size(), dtype)), dv(nans(keys.size(), dtype));
    Mirror<uint16_t> q(random.normal(total_q * num_q_heads * head_dim, dtype));
    Mirror<uint16_t> dout(random.normal(q.host.size(), dtype));
    Mirror<uint16_t> out(nans(q.host.size(), dtype)), dq(nans(q.host.size(), dtype));
    Mirror<float> lse(std::vector<float>(total_q * num_q_heads, NAN)), sinks(sinks_for(num_q_heads));

    auto tokens = [&](auto on, auto& x, int64_t total, int64_t heads) {
        return packed ? on(x, dtype, {total, heads, head_dim})
                      : on(x, dtype, {batch, total / batch, heads, head_dim});
    };
    auto set = [&](auto& args, auto on) {
        args.q = tokens(on, q, total_q, num_q_heads);
        args.k = tokens(on, k, total_k, num_kv_heads);
        args.v = tokens(on, v, total_k, num_kv_heads);
        args.out = tokens(on, out, total_q, num_q_heads);
        args.lse = packed ? on(lse, DType::float32, {total_q, num_q_heads})
                          : on(lse, DType::float32, {batch, total_q / batch, num_q_heads});
        if (packed) {
            args.cu_seqlens_q = on(cu_q, DType::int32, {batch + 1});
            args.cu_seqlens_k = on(cu_k, DType::int32, {batch + 1});
            args.max_seqlen_q = 640, args.max_seqlen_k = 900;
        }
        args.causal = masks.causal;
        args.window_left = masks.window_left;
        args.window_right = masks.window_right;
        args.attention_chunk = masks.attention_chunk;
        if (with_prefix) args.prefix_lens = on(prefix, DType::int32, {batch});
        args.block_mask = with_batch ? on(blocks, DType::uint8, {batch, mask_heads, q_blocks, k_blocks})
                                     : on(blocks, DType::uint8, {mask_heads, q_blocks, k_blocks});
        args.block_size = block_size;
        if (with_sinks) args.sinks = on(sinks, DType::float32, {num_q_heads});
    };
    auto backward = [&](auto on) {
        AttentionBackwardArgs args;
        set(args, on);
        args.dout = tokens(on, dout, total_q, num_q_heads);
        args.dq = tokens(on, dq, total_q, num_q_heads);
        args.dk = tokens(on, dk, total_k, num_kv_heads);
        args.dv = tokens(on, dv, total_k, num_kv_heads);
        if (args.q.device == kGpu && is_hopper() && head_dim <= 128) {
            EXPECT_EQ(explain(args).kernel.find("sm90_backward"), 0u) << explain(args).kernel;
        }
        attention_backward(args);
    };
    AttentionArgs forward;
    set(forward, kOnHost);
    attention(forward);
    out.upload(out.host);
    lse.upload(lse.host);
    backward(kOnHost);
    backward(kOnGpu);
    expect_near(dq.fetch(), dq.host, dtype, "dq");
    expect_near(dk.fetch(), dk.host, dtype, "dk");
    expect_near(dv.fetch(), dv.host, dtype, "dv");
}

INSTANTIATE_TEST_SUITE_P(All, CudaBlockMaskBackwardTest,
                         ::testing::Combine(::testing::Values(40, 64, 96, 128), ::testing::Values(64, 128),
                                            ::testing::Bool(), ::testing::Range(0u, 8u)));

}  // namespace
}  // namespace octavo
