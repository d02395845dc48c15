// What explain() says of calls, without a GPU.
#include "plan_testing.h"

#include <octavo/explain.h>

#include <optional>
#include <set>
#include <string>
#include <type_traits>
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
    AppendKvArgs codes = append;
    codes.k_pages.dtype = codes.v_pages.dtype = DType::int8;
    codes.v_scale = 0.5f;
    text = explain(codes, "a100");
    EXPECT_EQ(text.kernel, "append_codes_kernel<bfloat16>");
    EXPECT_EQ(field(text, "num_rows"), std::to_string(64 * (8 + 32))) << "those of queries, too";
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

// Whether all rows of a call start on 16 bytes, and end there. `strided`: makes room between the rows of an
// array, and moves those of one axis by half of that.
template <class Args, class Array>
Args strided(Args args, Array Args::* array, int axis) {
    TensorView* view;
    if constexpr (std::is_same_v<Array, TensorView>)
        view = &(args.*array);
    else
        view = &(args.*array).value();
    for (int outer = 0; outer < view->ndim - 1; ++outer) view->strides[outer] <<= view->ndim - 1 - outer;
    view->strides[axis] += 4;
    return args;
}

TEST(Explain, RowsThatMove16BytesAtATime) {
    Arrays arrays;
    auto in_chunks = [](const auto& args) { return field(explain(args, "a100"), "in_chunks"); };
    AppendKvArgs append;
    append.k = arrays.make(DType::bfloat16, {64, 8, 128});
    append.v = arrays.make(DType::bfloat16, {64, 8, 64});
    append.k_pages = arrays.make(DType::bfloat16, {100, 16, 8, 128});
    append.v_pages = arrays.make(DType::bfloat16, {100, 16, 8, 64});
    append.page_table = arrays.make(DType::int32, {64, 8});
    append.seq_lens = arrays.make(DType::int32, {64});
    AppendKvArgs rotary = append;
    rotary.rotary_cos = arrays.make(DType::float32, {500, 64});
    rotary.rotary_sin = arrays.make(DType::float32, {500, 64});
    rotary.q = arrays.make(DType::bfloat16, {64, 32, 128});
    rotary.q_out = arrays.make(DType::bfloat16, {64, 32, 128});
    for (const AppendKvArgs& call : {append, rotary}) {
        EXPECT_EQ(in_chunks(call), "true");
        for (int axis : {0, 1}) {
            EXPECT_EQ(in_chunks(strided(call, &AppendKvArgs::k, axis)), "false");
            EXPECT_EQ(in_chunks(strided(call, &AppendKvArgs::v, axis)), "false");
        }
        for (int axis : {0, 1, 2}) {
            EXPECT_EQ(in_chunks(strided(call, &AppendKvArgs::k_pages, axis)), "false");
            EXPECT_EQ(in_chunks(strided(call, &AppendKvArgs::v_pages, axis)), "false");
        }
        AppendKvArgs short_rows = call;  // of values, which end amid 16 bytes
        short_rows.v.shape[2] = short_rows.v_pages.shape[3] = 60;
        EXPECT_EQ(in_chunks(short_rows), "false");
        short_rows = call;
        short_rows.k.shape[2] = short_rows.k_pages.shape[3] = 124;
        if (call.q) short_rows.q->shape[2] = short_rows.q_out->shape[2] = 124;
        if (call.q) short_rows.rotary_cos->shape[1] = short_rows.rotary_sin->shape[1] = 56;
        EXPECT_EQ(in_chunks(short_rows), "false");
    }
    for (std::optional<float> AppendKvArgs::* scale : {&AppendKvArgs::k_scale, &AppendKvArgs::v_scale}) {
        AppendKvArgs scaled = append;
        scaled.*scale = 0.5f;
        EXPECT_EQ(in_chunks(scaled), "false");
    }
    for (int axis : {0, 1}) {
        EXPECT_EQ(in_chunks(strided(rotary, &AppendKvArgs::q, axis)), "false");
        EXPECT_EQ(in_chunks(strided(rotary, &AppendKvArgs::q_out, axis)), "false");
    }
    for (std::optional<TensorView> AppendKvArgs::* table :
         {&AppendKvArgs::rotary_cos, &AppendKvArgs::rotary_sin}) {
        AppendKvArgs moved = strided(rotary, table, 0);
        (moved.*table)->dtype = DType::float32;  // eight angles are 32 bytes
        EXPECT_EQ(in_chunks(moved), "false");
    }
    AppendKvArgs halves = rotary;  // each with 12 numbers
    halves.rotary_cos->shape[1] = halves.rotary_sin->shape[1] = 12;
    EXPECT_EQ(in_chunks(halves), "false");

    CopyPagesArgs copy;
    copy.k_pages = append.k_pages;
    copy.v_pages = append.v_pages;
    copy.copies = arrays.make(DType::int32, {3, 2});
    copy.to_k_pages = arrays.make(DType::bfloat16, {50, 16, 8, 128});
    copy.to_v_pages = arrays.make(DType::bfloat16, {50, 16, 8, 64});
    auto aligned = [](const CopyPagesArgs& args) {
        const Explanation text = explain(args, "a100");
        return field(text, "k_aligned") + " " + field(text, "v_aligned");
    };
    EXPECT_EQ(aligned(copy), "true true");
    for (int axis : {0, 1, 2}) {
        EXPECT_EQ(aligned(strided(copy, &CopyPagesArgs::k_pages, axis)), "false true");
        EXPECT_EQ(aligned(strided(copy, &CopyPagesArgs::v_pages, axis)), "true false");
        EXPECT_EQ(aligned(strided(copy, &CopyPagesArgs::to_k_pages, axis)), "false true");
        EXPECT_EQ(aligned(strided(copy, &CopyPagesArgs::to_v_pages, axis)), "true false");
    }
    copy.v_pages.shape[3] = copy.to_v_pages->shape[3] = 60;
    EXPECT_EQ(aligned(copy), "true false");

    RmsNormArgs norm;
    norm.x = arrays.make(DType::bfloat16, {2, 3, 64, 4096});
    norm.weight = arrays.make(DType::float32, {4096});
    norm.out = arrays.make(DType::bfloat16, {2, 3, 64, 4096});
    norm.residual = arrays.make(DType::bfloat16, {2, 3, 64, 4096});
    norm.residual_out = arrays.make(DType::bfloat16, {2, 3, 64, 4096});
    EXPECT_EQ(in_chunks(norm), "true");
    for (int axis : {0, 1, 2}) {
        EXPECT_EQ(in_chunks(strided(norm, &RmsNormArgs::x, axis)), "false");
        EXPECT_EQ(in_chunks(strided(norm, &RmsNormArgs::out, axis)), "false");
        EXPECT_EQ(in_chunks(strided(norm, &RmsNormArgs::residual, axis)), "false");
        EXPECT_EQ(in_chunks(strided(norm, &RmsNormArgs::residual_out, axis)), "false");
    }
    RmsNormArgs moved = norm;
    moved.weight.data = static_cast<char*>(moved.weight.data) + 8;
    EXPECT_EQ(in_chunks(moved), "false");
    norm.weight.shape[0] = norm.x.shape[3] = norm.out.shape[3] = 4092;
    norm.residual->shape[3] = norm.residual_out->shape[3] = 4092;
    EXPECT_EQ(in_chunks(norm), "false");
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
