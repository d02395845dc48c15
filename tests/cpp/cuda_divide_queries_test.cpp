// Drafts over caches of codes that decode in parts, against the CPU over the numbers that the codes stand
// for.
#include "coded_cache.h"
#include "cuda/divide_queries/plan.h"

#include <algorithm>
#include <string>
#include <tuple>
#include <vector>

namespace octavo {
namespace {

using cuda::Codes;

class CudaDivideQueriesTest : public ::testing::TestWithParam<std::tuple<Codes, unsigned>> {
  protected:
    static int pick_queries(Random& random, int most) {
        return random.pick({0, 1, 1, 2, 3, (most + 1) / 2, most - 1, most});
    }

    // In parts, whether that would be chosen or not, on workspace that is full of NaN before.
    static void run_divided(const AttentionParams& p) {
        if (!is_hopper()) return cuda::attention(p, nullptr);
        std::string why_not;
        const auto plan = cuda::make_divided_plan(p, cuda::gpu_of(0), &why_not);
        ASSERT_TRUE(plan) << why_not;
        ASSERT_EQ(plan->num_sequences, p.batch);
        poison_workspace(plan->workspace_bytes(), cuda::WorkspaceUser::divided_queries);
        cuda::run(p, *plan, nullptr);
    }
};

// Ragged drafts of up to `most` queries, sequences without queries and padding among them.
TEST_P(CudaDivideQueriesTest, AgreesWithTheCpu) {
    const auto [codes, seed] = GetParam();
    Random random(900 + seed);
    const bool has_int4 = cuda::type_of_values(codes) == DType::int4;
    const int64_t head_dim = random.pick({64, 96, 128, 128, 256, 192, has_int4 ? 32 : 80});
    const int64_t group_size = random.pick({1, 3, 4, 5, 8}), rows = head_dim > 128 ? 8 : 16;
    const auto of_a_part = static_cast<int>(rows / group_size);
    const int most = of_a_part + random.pick({1, 2, head_dim > 128 ? 17 * of_a_part : of_a_part});
    std::vector<int32_t> lengths_q{most}, lengths_k{most + random.pick({0, 1, 40, 1500})};
    for (int i = random.pick({0, 1, 5, 40}); i > 0; --i) {
        lengths_q.push_back(pick_queries(random, most));
        lengths_k.push_back(lengths_q.back() + random.pick({0, 1, 15, 16, 31, 64, 300, 700}));
        if (random.one_in(8)) lengths_k.back() = 0;  // padding
    }
    std::reverse(lengths_q.begin(), lengths_q.end());
    std::reverse(lengths_k.begin(), lengths_k.end());
    const DType dtype = random.pick({DType::float16, DType::bfloat16});
    const int64_t page_size = random.pick({1, 5, 16, 24, 256}), num_kv_heads = random.pick({1, 2, 3});
    Cache cache(random, lengths_k, page_size, num_kv_heads, head_dim, dtype);
    if (random.one_in(3)) cache.widen(cache.max_pages + random.pick({1, 20}));
    PagedCall call(random, cache, lengths_q, num_kv_heads * group_size, dtype);
    if (random.one_in(3)) call.options.window_left = random.pick({0, 3, 64, 500});
    if (random.one_in(4)) call.options.softcap = 15.0;
    call.options.max_seqlen_q = most;
    call.with_alibi = random.one_in(4);
    const Layout layout = pick_layout(random);
    const Scales scales = pick_scales(random, codes);
    const CodedCache coded(random, call, codes, layout, scales);
    SCOPED_TRACE(name_of(layout, scales));
    call.run_on_cpu();
    call.expect_right([&](const PagedAttentionArgs& args) { run_divided(coded.params(args)); });
}

INSTANTIATE_TEST_SUITE_P(Batches, CudaDivideQueriesTest,
                         ::testing::Combine(::testing::ValuesIn(cuda::kAllCodes), ::testing::Range(0u, 30u)),
                         [](const auto& info) {
                             return kCodesNames[static_cast<int>(std::get<0>(info.param))] +
                                    ("_" + std::to_string(std::get<1>(info.param)));
                         });

}  // namespace
}  // namespace octavo
