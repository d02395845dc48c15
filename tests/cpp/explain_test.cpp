// What explain() says of calls, without a GPU.
#include "plan_testing.h"

#include <octavo/explain.h>

#include <set>
#include <string>
#include <vector>

namespace octavo {
namespace {

TEST(Explain, NamesOneKernelAndWhyNotTheOthers) {
    for (unsigned seed = 0; seed < 500; ++seed) {
        Random random(seed);
        const PagedAttentionArgs args = random_paged(random, random.one_in(3));
        const Explanation text = explain(args, "h100");
        EXPECT_FALSE(text.kernel.empty() || text.summary.empty() || text.plan.empty());
        std::set<std::string> kernels{text.kernel.substr(0, text.kernel.find('<'))};
        for (const auto& [kernel, reason] : text.why_not) {
            EXPECT_TRUE(kernels.insert(kernel).second) << kernel;
            EXPECT_GE(reason.size(), 15u) << kernel << ": " << reason;
        }
        std::set<std::string> expected{"shared_prefix", "split_kv_decode", "stream_k_decode",
                                       "sm90_attention", "sm80_attention"};
        if (is_code(args.k_pages.dtype)) expected.insert({"expand_codes", "divide_queries"});
        if (args.q.shape[2] > 256) expected.insert("sm90_wide_attention");
        EXPECT_EQ(kernels, expected);
    }
}

TEST(Explain, KernelsAreThoseOfTheInstances) {
    const std::vector<std::string> instances = cuda::attention_instances(true);
    const std::set<std::string> names(instances.begin(), instances.end());
    EXPECT_EQ(names.size(), instances.size());
    for (unsigned seed = 0; seed < 200; ++seed) {
        Random random(seed);
        EXPECT_EQ(names.count(explain(random_dense_or_packed(random), "h100").kernel), 1u);
    }
}

TEST(Explain, WritesItsReasons) {
    Shape shape{1, 2048};
    shape.queries = 5;
    const std::string text = explain(paged(shape), "a100").to_string();
    EXPECT_EQ(
        text,
        "sm80_attention<bfloat16, head_dim 128, 1 stage>: 1 tile of 128 rows x 8 KV heads x 8 splits: 64 "
        "CTAs of 128 threads; then combine_splits_kernel (src/cuda/sm80_attention/kernel.cuh)\n"
        "  not shared_prefix: shared_prefix_len is 0\n"
        "  not split_kv_decode: it takes at most 16 rows per KV head for head_dim 128, and these are 20: 5 "
        "query "
        "tokens of 4 query heads\n"
        "  not stream_k_decode: it takes at most 16 rows per KV head for head_dim 128, and these are 20: 5 "
        "query "
        "tokens of 4 query heads\n"
        "  not sm90_attention: it consists of instructions that only sm_90a has, and this GPU is sm_80");
}

TEST(Explain, OtherOperators) {
    Arrays arrays;
    AppendKvArgs append;
    append.k = arrays.make(DType::bfloat16, {64, 8, 128});
    append.v = arrays.make(DType::bfloat16, {64, 8, 128});
    append.k_pages = arrays.make(DType::bfloat16, {100, 16, 8, 128});
    append.v_pages = arrays.make(DType::bfloat16, {100, 16, 8, 128});
    append.page_table = arrays.make(DType::int32, {64, 8});
    append.seq_lens = arrays.make(DType::int32, {64});
    Explanation text = explain(append, "a100");
    EXPECT_EQ(text.kernel, "append_kv_kernel<bfloat16>");
    EXPECT_EQ(field(text, "in_chunks"), "true");
    EXPECT_EQ(field(text, "num_ctas"), "16");
    append.k_scale = 0.5f;
    EXPECT_EQ(field(explain(append, "a100"), "in_chunks"), "false");
    append.rotary_cos = arrays.make(DType::float32, {500, 64});
    append.rotary_sin = arrays.make(DType::float32, {500, 64});
    append.q = append.q_out = arrays.make(DType::bfloat16, {64, 32, 128});
    text = explain(append, "a100");
    EXPECT_EQ(text.kernel, "append_rotary_kernel<bfloat16>");
    EXPECT_EQ(field(text, "num_ctas"), std::to_string(64 * 3));
    EXPECT_EQ(field(text, "in_chunks"), "true");
    CopyPagesArgs copy;
    copy.k_pages = append.k_pages;
    copy.v_pages = append.v_pages;
    copy.copies = arrays.make(DType::int32, {3, 2});
    EXPECT_EQ(field(explain(copy, "a100"), "num_rows"), std::to_string(3 * 16 * 8));
    MergeStatesArgs merge;
    merge.out_a = merge.out_b = merge.out = append.k;
    merge.lse_a = merge.lse_b = merge.lse = arrays.make(DType::float32, {64, 8});
    EXPECT_EQ(explain(merge, "sm_80").kernel, "merge_states_kernel<bfloat16>");
    RmsNormArgs norm;
    norm.x = norm.out = arrays.make(DType::bfloat16, {64, 4096});
    norm.weight = arrays.make(DType::float32, {4096});
    text = explain(norm, "a100");
    EXPECT_EQ(text.kernel, "rms_norm_kernel<bfloat16, weight float32>");
    EXPECT_EQ(field(text, "num_ctas"), "64");
}

TEST(Explain, Devices) {
    const PagedAttentionArgs args = paged({});
    EXPECT_EQ(kind_of(args, "cpu"), "cpu_attention");
    for (const std::string& gpu : explainable_gpus())
        EXPECT_EQ(explain(args, gpu).plan[0].first, "dtype") << gpu;
    EXPECT_EQ(explain(args, "sm_90").to_string(), explain(args, "h100").to_string());
    EXPECT_THROW(explain(args), ValueError);  // the device of shapes
    EXPECT_THROW(explain(args, "sm_75"), ValueError);
    EXPECT_THROW(explain(args, "cuda:x"), ValueError);
    EXPECT_THROW(paged_attention(args), DeviceError);
}

TEST(Explain, NullAddressesWillDo) {
    PagedAttentionArgs args = paged({64, 1024});
    const Explanation text = explain(args, "h100");
    for (TensorView* array :
         {&args.q, &args.out, &args.k_pages, &args.v_pages, &args.page_table, &args.seq_lens})
        array->data = nullptr;
    EXPECT_EQ(explain(args, "h100").to_string(), text.to_string());
}

TEST(Explain, Int64ChangesNoPlan) {
    for (unsigned seed = 0; seed < 200; ++seed) {
        Random random(seed);
        PagedAttentionArgs args = random_paged(random, random.one_in(3));
        const Explanation text = explain(args, "h100");
        args.page_table.dtype = args.seq_lens.dtype = DType::int64;
        if (args.cu_seqlens_q) args.cu_seqlens_q->dtype = DType::int64;
        if (args.prefix_lens) args.prefix_lens->dtype = DType::int64;
        EXPECT_EQ(explain(args, "h100").to_string(), text.to_string());
        args.seq_lens.dtype = DType::uint8;
        EXPECT_THROW(explain(args, "h100"), TypeError);
    }
}

TEST(Explain, RefusesWhatTheCallRefuses) {
    PagedAttentionArgs args = paged({});
    args.num_splits = 0;
    EXPECT_THROW(explain(args, "h100"), ValueError);
    Shape shape;
    shape.dtype = DType::float32;
    EXPECT_THROW(explain(paged(shape), "h100"), TypeError);
    EXPECT_EQ(kind_of(paged(shape), "cpu"), "cpu_attention");
}

}  // namespace
}  // namespace octavo
