// Decoding over caches of codes on CUDA, against the CPU over the numbers that the codes stand for.
#include "coded_cache.h"
#include "cuda/decode/plain_calls.h"

#include <octavo/paged_attention.h>

#include <string>
#include <tuple>

namespace octavo {
namespace {

using cuda::Codes;

struct CodesCase {
    std::string name;
    std::vector<int32_t> lengths;
    int64_t num_kv_heads, group_size;
    int32_t seqlen_q = 1;
    int64_t room = 0;
};

class CudaCodesTest : public ::testing::TestWithParam<std::tuple<Codes, CodesCase>> {};

TEST_P(CudaCodesTest, AgreesWithTheCpu) {
    const auto& [codes, full] = GetParam();
    CodesCase c = full;
    if (is_small_scale()) {
        // Few items are shared out by length, if they are not long; splits of one size are long.
        const bool by_length = c.lengths.size() == 3;
        if (!by_length)
            c.room = std::max<int64_t>(c.room, *std::max_element(c.lengths.begin(), c.lengths.end()));
        c.lengths = scaled_batch(c.lengths, c.num_kv_heads, c.lengths.size() > 30 ? 1100 : kManyKeys);
        c.num_kv_heads = by_length ? 1 : scaled_heads(c.num_kv_heads);
    }
    const bool has_int4 = cuda::type_of_values(codes) == DType::int4;
    constexpr int64_t kPageSizes[] = {16, 1, 24, 64, 5};
    unsigned seed = 17 * static_cast<unsigned>(full.lengths.size()) + static_cast<unsigned>(codes);
    std::vector<int64_t> head_dims{128, 64, has_int4 ? 96 : 80, 256};
    // Sixteen rows have instances of their own.
    if (is_small_scale() && c.group_size * c.seqlen_q == 16)
        head_dims.resize(2);
    else if (is_small_scale())
        head_dims = {head_dims[seed % 4]};
    for (const int64_t head_dim : head_dims) {
        // Above head dim 128, those of one query token are divided into parts of eight query heads.
        const bool is_decode = c.group_size * c.seqlen_q <= (head_dim <= 128 || c.seqlen_q == 1 ? 16 : 8);
        Random random(seed++);
        SCOPED_TRACE("head_dim " + std::to_string(head_dim));
        const int64_t page_size = head_dim == 128 ? 16 : kPageSizes[seed % 5];
        const DType dtype = random.pick({DType::float16, DType::bfloat16});
        Cache cache(random, at_least(c.lengths, c.seqlen_q), page_size, c.num_kv_heads, head_dim, dtype);
        cache.widen(std::max(cache.max_pages, c.room / page_size));
        PagedCall call(random, cache, c.seqlen_q, c.num_kv_heads * c.group_size, dtype);
        if (random.one_in(3)) call.options.window_left = random.pick({0, 10, 90, 300});
        if (random.one_in(4)) call.options.softcap = 20.0;
        call.with_alibi = random.one_in(3);
        if (random.one_in(4)) call.pick_prefix_lens(random);
        const Layout layout = head_dim == 128 ? Layout::head_major : pick_layout(random);
        const Scales scales = pick_scales(random, codes);
        const CodedCache coded(random, call, codes, layout, scales);
        SCOPED_TRACE(name_of(layout, scales));
        call.run_on_cpu();
        auto as_chosen = [&](const PagedAttentionArgs& args) {
            const AttentionParams p = coded.params(args);
            const bool is_served = cuda::plan_split_kv(p, cuda::gpu_of(0)).has_value();
            ASSERT_EQ(is_served || cuda::plan_stream_k(p, cuda::gpu_of(0)), is_decode);
            cuda::attention(p, nullptr);
        };
        auto by_sm80 = [&](const PagedAttentionArgs& args) {
            const AttentionParams p = coded.params(args);
            cuda::run(p, cuda::plan_sm80_attention(p, cuda::gpu_of(0)), nullptr);
        };
        auto by_stream_k = [&](const PagedAttentionArgs& args) {
            const AttentionParams p = coded.params(args);
            std::string why_not;
            const auto plan = cuda::plan_stream_k(p, cuda::gpu_of(0), &why_not);
            ASSERT_TRUE(plan) << why_not;
            cuda::run(p, *plan, nullptr);
        };
        auto batch_invariant = [&](const PagedAttentionArgs& args) {
            AttentionParams p = coded.params(args);
            p.batch_invariant = true;
            ASSERT_TRUE(cuda::plan_split_kv(p, cuda::gpu_of(0)));
            cuda::attention(p, nullptr);
        };
        {
            SCOPED_TRACE("as chosen");
            call.expect_right(as_chosen);
        }
        if (HasFatalFailure()) return;
        {
            SCOPED_TRACE("by sm80_attention");
            call.expect_right(by_sm80);
        }
        if (HasFatalFailure()) return;
        if (!is_decode) continue;
        {
            SCOPED_TRACE("by stream_k_decode");
            call.expect_right(by_stream_k);
        }
        if (HasFatalFailure()) return;
        {
            SCOPED_TRACE("batch-invariant");
            call.expect_right(batch_invariant);
        }
        if (HasFatalFailure()) return;
        {
            SCOPED_TRACE("without options, which has instances of its own");
            call.options.window_left = -1;
            call.options.softcap = 0.0;
            call.with_alibi = call.with_sinks = false;
            call.prefix_lens.reset();
            ASSERT_TRUE(cuda::is_plain(coded.params(call.arguments(kOnGpu))));
            call.run_on_cpu();
            call.expect_right(as_chosen);
            call.expect_right(by_stream_k);
        }
        if (HasFatalFailure()) return;
    }
}

std::vector<int32_t> spread(int32_t batch, int32_t longest) {
    std::vector<int32_t> lengths(batch);
    for (int32_t i = 0; i < batch; ++i) lengths[i] = i * i * 389 % (longest + 1);
    return lengths;
}

const CodesCase kCases[] = {
    {"one_short", {37}, 2, 4},
    {"one_long", {5003}, 2, 4},
    {"one_head", {3000}, 1, 8},
    {"one_by_last_split", {4096}, 8, 4},
    {"one_of_sixteen_rows", {5003}, 2, 16},
    {"few_by_length", {3001, 40, 900}, 2, 2},
    {"many_short", spread(80, 300), 4, 1},
    {"ragged", spread(40, 2000), 4, 4},
    {"sixteen_rows", spread(12, 1500), 2, 16},
    {"short_sixteen_rows", spread(8, 500), 2, 16},
    {"three_rows", spread(9, 1500), 2, 3},
    {"drafts", spread(10, 1500), 2, 2, 4},
    {"drafts_of_four_rows", spread(9, 900), 2, 2, 2},
    {"prefill", spread(7, 700), 2, 3, 90},
    {"room", std::vector<int32_t>(20, 600), 8, 4, 1, 40000},
};

std::string name_of(const ::testing::TestParamInfo<std::tuple<Codes, CodesCase>>& info) {
    return kCodesNames[static_cast<int>(std::get<0>(info.param))] + ("_" + std::get<1>(info.param).name);
}

INSTANTIATE_TEST_SUITE_P(Codes, CudaCodesTest,
                         ::testing::Combine(::testing::ValuesIn(cuda::kAllCodes),
                                            ::testing::ValuesIn(kCases)),
                         name_of);

}  // namespace
}  // namespace octavo
