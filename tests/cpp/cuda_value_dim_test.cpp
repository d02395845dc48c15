// Values with a head dim of their own: the kernel that is chosen against the CPU.
#include "cuda/backend.h"
#include "dense_call.h"
#include "explain_testing.h"

#include <octavo/explain.h>

#include <utility>

namespace octavo {
namespace {

class CudaValueDimTest : public ::testing::TestWithParam<unsigned> {};

// By Hopper's kernel, too, which serves dims that are equally many blocks of 64 columns, and 192 with 128.
TEST_P(CudaValueDimTest, AgreesWithTheCpu) {
    Random random(GetParam());
    using Dims = std::pair<int64_t, int64_t>;
    const auto [head_dim, value_dim] = random.pick<Dims>(
        {{192, 128}, {192, 128}, {192, 128}, {160, 72}, {136, 128}, {128, 120}, {72, 128}, {240, 200}});
    DenseCall call(random, GetParam(), head_dim, value_dim, random.pick({0, 0, 8}));
    // No instance has these together; the other kernel is tested with all of them.
    if (call.args.dropout_p > 0.0) call.with_alibi = false;
    if (call.with_blocks && (head_dim > 128 || call.args.dropout_p > 0.0 || call.with_alibi))
        call.with_blocks = false;
    if (call.args.softmax_scale && *call.args.softmax_scale <= 0.0) call.args.softmax_scale = 0.3;
    call.run_on_cpu();
    call.expect_right([](const AttentionArgs& args) {
        if (is_hopper()) {
            const Explanation text = explain(args, "");
            EXPECT_EQ(kind_of(text), "sm90_attention") << text.to_string();
        }
        attention(args);
    });
}

INSTANTIATE_TEST_SUITE_P(Seeds, CudaValueDimTest, ::testing::Range(0u, 64u));

// Packed sequences of few queries among others of many, which warps share out another way; and pairs of CTAs.
TEST(CudaValueDim, FewRowsAndPairs) {
    for (const bool few : {true, false}) {
        constexpr int64_t kHeads = 4, kHeadDim = 192, kValueDim = 128;
        Random random(few);
        const DType dtype = DType::bfloat16;
        std::vector<int32_t> lengths_q(24, few ? 1 : 1024), lengths_k(24, few ? 400 : 1024);
        if (few) lengths_q[3] = lengths_q[17] = 200, lengths_q[5] = 7, lengths_q[9] = 0;
        if (!few) lengths_q.resize(2), lengths_k.resize(2);
        const int64_t batch = static_cast<int64_t>(lengths_q.size());
        Mirror<int32_t> cu_q(cumulative(lengths_q)), cu_k(cumulative(lengths_k));
        const int64_t total_q = cu_q.host.back(), total_k = cu_k.host.back();
        Mirror<uint16_t> q(random.normal(total_q * kHeads * kHeadDim, dtype));
        Mirror<uint16_t> k(random.normal(total_k * kHeads * kHeadDim, dtype));
        Mirror<uint16_t> v(random.normal(total_k * kHeads * kValueDim, dtype));
        Mirror<uint16_t> out(nans(total_q * kHeads * kValueDim, dtype));
        auto run = [&](auto on) {
            AttentionArgs args;
            args.causal = true;
            auto tokens = [&](auto& x, int64_t total, int64_t dim) {
                return few ? on(x, dtype, {total, kHeads, dim})
                           : on(x, dtype, {batch, total / batch, kHeads, dim});
            };
            args.q = tokens(q, total_q, kHeadDim);
            args.k = tokens(k, total_k, kHeadDim);
            args.v = tokens(v, total_k, kValueDim);
            args.out = tokens(out, total_q, kValueDim);
            if (few) {
                args.cu_seqlens_q = on(cu_q, DType::int32, {batch + 1});
                args.cu_seqlens_k = on(cu_k, DType::int32, {batch + 1});
                args.max_seqlen_q = 200;
                args.max_seqlen_k = 400;
            }
            if (args.q.device == kGpu && is_hopper()) {
                const Explanation text = explain(args, "");
                EXPECT_EQ(field(text, "head_dim_v"), "128") << text.to_string();
                EXPECT_EQ(field(text, few ? "feature" : "cluster"), few ? "few_rows" : "2")
                    << text.to_string();
            }
            attention(args);
        };
        run(kOnHost);
        run(kOnGpu);
        ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
        expect_close(out.fetch(), out.host, dtype);
    }
}

}  // namespace
}  // namespace octavo
