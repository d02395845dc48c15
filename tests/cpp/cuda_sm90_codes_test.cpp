// Prefill over caches of codes on Hopper, against the CPU over the numbers that the codes stand for.
#include "coded_cache.h"

#include <algorithm>
#include <string>
#include <tuple>

namespace octavo {
namespace {

using cuda::Codes;

// A batch of packed queries over codes, with masks, scales and a layout of any kind.
class CudaSm90CodesTest : public ::testing::TestWithParam<std::tuple<Codes, unsigned>> {
  protected:
    // By sm90_attention; with splits, by the instance that shares out keys.
    void expect_right(Random& random, const std::vector<int32_t>& lengths_q,
                      const std::vector<int32_t>& lengths_k, int64_t num_kv_heads, int64_t group_size,
                      bool splits) {
        const Codes codes = std::get<0>(GetParam());
        const bool has_int4 = cuda::type_of_values(codes) == DType::int4;
        const DType dtype = random.pick({DType::float16, DType::bfloat16});
        const int64_t head_dim = random.pick({64, 96, 128, 128, has_int4 ? 32 : 80});
        Cache cache(random, lengths_k, random.pick({1, 5, 16, 24, 256}), num_kv_heads, head_dim, dtype);
        PagedCall call(random, cache, lengths_q, num_kv_heads * group_size, dtype);
        pick_masks(random, call.options);
        if (splits && call.options.window_left >= 0) call.options.window_left += 1200;
        if (splits && call.options.attention_chunk > 0) call.options.attention_chunk += 1200;
        call.options.max_seqlen_q = *std::max_element(lengths_q.begin(), lengths_q.end());
        call.with_alibi = !splits && random.one_in(4);
        if (random.one_in(4)) call.pick_prefix_lens(random);
        const Layout layout = pick_layout(random);
        const Scales scales = pick_scales(random, codes);
        const CodedCache coded(random, call, codes, layout, scales);
        SCOPED_TRACE(name_of(layout, scales));
        call.run_on_cpu();
        call.expect_right([&](const PagedAttentionArgs& args) {
            const AttentionParams p = coded.params(args);
            if (is_hopper()) {
                std::string why_not;
                const auto plan = cuda::plan_sm90_attention(p, cuda::gpu_of(0), &why_not);
                ASSERT_TRUE(plan) << why_not;
                if (splits) {
                    ASSERT_EQ(field(describe(*plan), "feature"), "splits");
                }
            }
            cuda::attention(p, nullptr);
        });
    }
};

TEST_P(CudaSm90CodesTest, MixedBatches) {
    Random random(std::get<1>(GetParam()));
    const std::vector<int32_t> lengths_q = mixed_lengths_q(random);
    const std::vector<int32_t> lengths_k = longer(random, lengths_q);
    expect_right(random, lengths_q, lengths_k, random.pick({2, 3}), random.pick({1, 3, 4, 8}), false);
}

// Row tiles for a part of the SMs, which share out their keys.
TEST_P(CudaSm90CodesTest, Splits) {
    Random random(std::get<1>(GetParam()));
    std::vector<int32_t> lengths_q{random.pick({160, 200})};
    std::vector<int32_t> lengths_k{lengths_q[0] + random.pick({2501, 4000})};
    for (int32_t i = random.pick({0, 1, 3}); i > 0; --i) {
        lengths_q.push_back(random.pick({0, 1, 17, 64, 100, 129}));
        lengths_k.push_back(lengths_q.back() + random.pick({0, 130, 1000, 2501, 4000}));
    }
    expect_right(random, lengths_q, lengths_k, random.pick({2, 3}), random.pick({3, 4, 5, 8}), true);
}

std::string name_of(const ::testing::TestParamInfo<std::tuple<Codes, unsigned>>& info) {
    return kCodesNames[static_cast<int>(std::get<0>(info.param))] +
           ("_" + std::to_string(std::get<1>(info.param)));
}

INSTANTIATE_TEST_SUITE_P(Codes, CudaSm90CodesTest,
                         ::testing::Combine(::testing::ValuesIn(cuda::kAllCodes), ::testing::Range(0u, 12u)),
                         name_of);

}  // namespace
}  // namespace octavo
