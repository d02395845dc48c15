// Page tables, lengths and offsets of int64, which every kernel reads as it does those of int32.
#include "paged_call.h"

#include <octavo/paged_attention.h>

#include <vector>

namespace octavo {
namespace {

Mirror<int64_t> wide(const Mirror<int32_t>& narrow) {
    std::vector<int64_t> values;
    for (int32_t x : narrow.host) values.push_back(x);
    return Mirror<int64_t>(values);
}

// The call by `run` with each of its arrays of int64, and with all of them, has the bits that it has with
// int32; and those are right.
template <class Run>
void expect_the_same_of_int64(PagedCall& call, Run run) {
    call.run_on_cpu();
    call.expect_right(run);
    const PagedCall::Results narrow = call.fetch();
    const Mirror<int64_t> table = wide(call.table), lengths = wide(call.lengths);
    const Mirror<int64_t> begins = wide(call.cu_seqlens_q);
    const Mirror<int64_t> prefixes = wide(call.prefix_lens ? *call.prefix_lens : call.lengths);
    for (unsigned which : {1u, 2u, 4u, 8u, 15u}) {
        SCOPED_TRACE(which);
        call.run_on_gpu([&](PagedAttentionArgs args) {
            auto widen = [](TensorView& view, const Mirror<int64_t>& numbers) {
                ASSERT_EQ(static_cast<size_t>(view.size()), numbers.host.size());
                const TensorView of_int32 = view;
                view = numbers.on_gpu(DType::int64, {view.size()});
                view.ndim = of_int32.ndim;
                view.shape = of_int32.shape;
                view.strides = of_int32.strides;
            };
            if (which & 1) widen(args.page_table, table);
            if (which & 2) widen(args.seq_lens, lengths);
            if (which & 4 && args.cu_seqlens_q) widen(*args.cu_seqlens_q, begins);
            if (which & 8 && args.prefix_lens) widen(*args.prefix_lens, prefixes);
            run(args);
        });
        EXPECT_TRUE(call.fetch() == narrow) << call.name();
    }
}

class CudaInt64Test : public ::testing::TestWithParam<unsigned> {
  protected:
    Random random_{GetParam()};
    const DType dtype_ = random_.pick({DType::float16, DType::bfloat16});
    const int64_t head_dim_ = random_.pick({64, 128});

    // `set(call)` makes of packed queries what is wanted.
    template <class Set, class Run>
    void expect_the_same(const std::vector<int32_t>& lengths_q, int64_t page_size, int64_t group_size,
                         Set set, Run run) {
        const Cache cache(random_, longer(random_, lengths_q), page_size, 2, head_dim_, dtype_);
        PagedCall call(random_, cache, lengths_q, 2 * group_size, dtype_);
        call.packed = true;
        call.options.max_seqlen_q = *std::max_element(lengths_q.begin(), lengths_q.end());
        set(call);
        expect_the_same_of_int64(call, run);
    }
    void with_prefix_or_without(PagedCall& call) {
        if (random_.one_in(2)) call.pick_prefix_lens(random_);
    }
};

TEST_P(CudaInt64Test, SplitKv) {
    const auto set = [this](PagedCall& call) {
        if (random_.one_in(2)) call.options.window_left = 100;
        if (random_.one_in(2)) call.options.batch_invariant = true;
    };
    expect_the_same({1, 2, 0, 1}, random_.pick({5, 16}), 4, set,
                    [](const PagedAttentionArgs& args) { run_by(cuda::plan_split_kv, args); });
}

TEST_P(CudaInt64Test, StreamK) {
    expect_the_same(
        std::vector<int32_t>(std::min(random_.pick({3, 50}), is_small_scale() ? 6 : 50), 1),
        random_.pick({5, 16}), 4, [this](PagedCall& call) { with_prefix_or_without(call); },
        [](const PagedAttentionArgs& args) { run_by(cuda::plan_stream_k, args); });
}

TEST_P(CudaInt64Test, Sm90Attention) {
    if (!is_hopper()) return;  // there is no such kernel
    expect_the_same(
        mixed_lengths_q(random_), 16, random_.pick({1, 4}),
        [this](PagedCall& call) { with_prefix_or_without(call); },
        [](const PagedAttentionArgs& args) { run_by(cuda::plan_sm90_attention, args); });
}

TEST_P(CudaInt64Test, Sm80Attention) {
    expect_the_same(
        random_.pick<std::vector<int32_t>>({{130, 1, 0, 70}, {33}}), random_.pick({3, 16}), 3,
        [this](PagedCall& call) { with_prefix_or_without(call); },
        [](const PagedAttentionArgs& args) {
            const AttentionParams params = check_paged_attention(args);
            cuda::run(params, cuda::plan_sm80_attention(params, cuda::gpu_of(0)), nullptr);
        });
}

INSTANTIATE_TEST_SUITE_P(Seeds, CudaInt64Test, ::testing::Range(0u, 6u));

}  // namespace
}  // namespace octavo
