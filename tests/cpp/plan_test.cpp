// Which kernel serves which call, and how it cuts the work: pure functions, which need no GPU.
#include "allocator_testing.h"
#include "plan_testing.h"

#include <string>
#include <utility>
#include <variant>
#include <vector>

namespace octavo {
namespace {

TEST(Plan, ManyQueries) {
    Shape shape{4, 2048};
    shape.queries = 2048;
    EXPECT_EQ(kind_of(dense(shape)), "sm90_attention");
    EXPECT_EQ(kind_of(packed(shape)), "sm90_attention");
    EXPECT_EQ(kind_of(dense({4, 1})), "sm90_attention") << "an axis of length 1 may have any stride";
    EXPECT_EQ(kind_of(paged(shape)), "sm90_attention");
    EXPECT_EQ(kind_of(dense(shape), "a100"), "sm80_attention");
    EXPECT_EQ(kind_of(dense(shape), "b200"), "sm80_attention");
    shape.queries = 20;  // verifies drafts
    EXPECT_EQ(field(explain(paged(shape), "h200"), "feature"), "splits");
}

// The kernel that combines splits would write the rows of earlier sequences, too.
TEST(Plan, TheRestOfAPackedBatchIsNotSplit) {
    Shape shape{1, 8192};
    const Gpu& gpu = *cuda::find_gpu("a100");
    const auto num_splits = [](const KernelPlan& plan) { return std::get<cuda::Sm80Plan>(plan).num_splits; };
    for (int64_t queries : {64, 100}) {
        shape.queries = queries;
        PagedAttentionArgs args = paged(shape);
        EXPECT_GT(num_splits(cuda::plan_kernel(checked(args), gpu)), 1);
        EXPECT_EQ(num_splits(cuda::plan_rest(checked(args), gpu)), 1);
        args.num_splits = 3;
        EXPECT_EQ(num_splits(cuda::plan_kernel(checked(args), gpu)), 3);
        EXPECT_EQ(num_splits(cuda::plan_rest(checked(args), gpu)), 1);
    }
    const AttentionParams unpacked = checked(paged({1, 8192}));
    EXPECT_GT(num_splits(cuda::plan_rest(unpacked, gpu)), 1);
}

// The copy engine brings a multiple of eight keys at a time; those of other pages are gathered.
TEST(Plan, SmallPages) {
    Shape shape{4, 2048};
    shape.queries = 2048;
    for (const auto& [page_size, box_keys] :
         {std::pair(1, "0"), {5, "0"}, {12, "0"}, {24, "8"}, {16, "16"}}) {
        shape.page_size = page_size;
        EXPECT_EQ(kind_of(paged(shape)), "sm90_attention");
        EXPECT_EQ(field(explain(paged(shape), "h200"), "box_keys"), box_keys) << page_size;
    }
    shape.page_size = 1;
    const Explanation text = explain(paged(shape), "h200");
    EXPECT_EQ(text.kernel, "sm90_attention<bfloat16 over small pages, head_dim 128, 192 rows>");
    shape.queries = 20;
    EXPECT_EQ(field(explain(paged(shape), "h200"), "feature"), "splits");
    shape.queries = 2048;
    PagedAttentionArgs args = paged(shape);
    args.alibi_slopes = Arrays().make(DType::float32, {32});
    EXPECT_EQ(kind_of(args), "sm80_attention");
    // Long chunks of prompts are looked at by length, but not where keys are gathered.
    shape = {4, 8192, 4, 4, 256};
    shape.queries = 512;
    for (const auto& [page_size, by_length] : {std::pair(1, "false"), {16, "true"}}) {
        shape.page_size = page_size;
        EXPECT_EQ(field(explain(paged(shape), "h200"), "by_length"), by_length) << page_size;
    }
}

// Places of keys are counted in 16 bytes, in 32 bits, of which the largest number stands for no place.
TEST(Plan, SmallPagesOf64GB) {
    Shape shape{4, 2048, 1, 32, 24};
    shape.queries = 2048;
    shape.page_size = 1;
    PagedAttentionArgs args = paged(shape);
    constexpr int64_t kLast = ((int64_t{1} << 32) - 1) / 3;  // a page has three times 16 bytes
    args.k_pages.shape[0] = args.v_pages.shape[0] = kLast;
    EXPECT_EQ(kind_of(args), "sm90_attention");
    args.k_pages.shape[0] = args.v_pages.shape[0] = kLast + 1;
    EXPECT_EQ(kind_of(args), "sm80_attention");
    for (TensorView PagedAttentionArgs::* pages :
         {&PagedAttentionArgs::k_pages, &PagedAttentionArgs::v_pages}) {
        args.k_pages.shape[0] = args.v_pages.shape[0] = kLast;
        (args.*pages).strides[0] *= 2;
        EXPECT_EQ(kind_of(args), "sm80_attention");
        (args.*pages).strides[0] /= 2;
    }
}

TEST(Plan, ManyQueriesOfWideHeads) {
    Shape shape{4, 2048};
    shape.queries = 2048;
    shape.head_dim = 512;
    EXPECT_EQ(kind_of(dense(shape)), "sm90_wide_attention");
    EXPECT_EQ(kind_of(packed(shape)), "sm90_wide_attention");
    EXPECT_EQ(kind_of(paged(shape)), "sm90_wide_attention");
    EXPECT_EQ(field(explain(paged(shape), "h100"), "num_ctas"), "132");
    EXPECT_EQ(kind_of(dense(shape), "a100"), "sm80_attention");
    EXPECT_EQ(kind_of(dense(shape), "b200"), "sm80_attention");
    AttentionArgs args = dense(shape);
    args.dropout_p = 0.5;
    args.dropout_seed = 1;
    EXPECT_EQ(kind_of(args), "sm80_attention");
    for (int64_t head_dim : {264, 448, 456}) {
        shape.head_dim = head_dim;
        EXPECT_EQ(kind_of(dense(shape)), head_dim < 456 ? "sm80_attention" : "sm90_wide_attention");
    }
    shape.head_dim = 512;
    shape.value_dim = 256;
    EXPECT_EQ(kind_of(dense(shape)), "sm80_attention");
    shape.value_dim = 0;
    shape.page_size = 5;
    EXPECT_EQ(kind_of(paged(shape)), "sm80_attention");
    shape.page_size = 16;
    shape.queries = 1;  // decodes
    EXPECT_EQ(kind_of(dense(shape)), "sm90_wide_attention");
    shape.group_size = 16;
    EXPECT_EQ(kind_of(paged(shape)), "sm80_attention");
    shape.queries = 20;
    EXPECT_EQ(kind_of(paged(shape)), "sm90_wide_attention");
    shape.batch = shape.num_kv_heads = 1;  // three row tiles
    EXPECT_EQ(kind_of(paged(shape)), "sm80_attention");
}

TEST(Plan, StridesAndAddresses) {
    Shape shape{4, 2048};
    shape.queries = 2048;
    AttentionArgs many = dense(shape);
    many.k.strides = {2048 * 8 * 129, 8 * 129, 129, 1};
    EXPECT_EQ(kind_of(many), "sm80_attention");
    many = dense(shape);
    many.v.data = static_cast<char*>(many.v.data) + 8;
    EXPECT_EQ(kind_of(many), "sm80_attention");
    PagedAttentionArgs few = paged({64, 2048});
    few.q.data = static_cast<char*>(few.q.data) + 2;
    EXPECT_EQ(kind_of(few), "sm80_attention");
    few = paged({64, 2048});  // a head-major cache
    few.k_pages.strides = few.v_pages.strides = {8 * 16 * 128, 128, 16 * 128, 1};
    EXPECT_EQ(kind_of(few), "split_kv_decode");
}

// Each stride counts: rows of one axis may start on 16 bytes where those of another do not.
TEST(Plan, RowsThatDoNotStartOn16Bytes) {
    auto with_room = [](TensorView& array, int axis) {
        for (int outer = 0; outer < array.ndim - 1; ++outer) array.strides[outer] <<= array.ndim - 1 - outer;
        if (axis >= 0) array.strides[axis] += 4;
    };
    Shape shape{4, 2048};
    shape.queries = 2048;
    constexpr std::pair<TensorView AttentionArgs::*, const char*> kArrays[] = {
        {&AttentionArgs::q, "q_aligned"},
        {&AttentionArgs::k, "k_aligned"},
        {&AttentionArgs::v, "v_aligned"},
        {&AttentionArgs::out, "out_aligned"}};
    for (const auto& [array, name] : kArrays) {
        for (int axis : {-1, 0, 1, 2}) {
            AttentionArgs args = dense(shape);
            with_room(args.*array, axis);
            EXPECT_EQ(kind_of(args), axis < 0 ? "sm90_attention" : "sm80_attention") << name << ", " << axis;
            for (const auto& [other, other_name] : kArrays) {
                EXPECT_EQ(field(explain(args, "a100"), other_name),
                          other == array && axis >= 0 ? "false" : "true")
                    << name << ", " << axis;
            }
        }
    }
    for (TensorView PagedAttentionArgs::* array : {&PagedAttentionArgs::q, &PagedAttentionArgs::k_pages,
                                                   &PagedAttentionArgs::v_pages, &PagedAttentionArgs::out}) {
        for (int axis = -1; axis < (paged(shape).*array).ndim - 1; ++axis) {
            PagedAttentionArgs args = paged({64, 2048});
            if (axis >= (args.*array).ndim - 1) break;
            with_room(args.*array, axis);
            EXPECT_EQ(kind_of(args), axis < 0 ? "split_kv_decode" : "sm80_attention") << axis;
        }
    }
}

// The copy engine takes strides of less than 1 TB, and is shown as many tokens below an array as a sequence
// may have.
TEST(Plan, WhatTheCopyEngineTakes) {
    Shape shape{4, 2048};
    shape.queries = 2048;
    for (TensorView AttentionArgs::* array :
         {&AttentionArgs::q, &AttentionArgs::k, &AttentionArgs::v, &AttentionArgs::out}) {
        AttentionArgs args = dense(shape);
        (args.*array).strides[0] = (int64_t{1} << 39) - 8;
        EXPECT_EQ(kind_of(args), "sm90_attention");
        (args.*array).strides[0] += 8;
        EXPECT_EQ(kind_of(args), "sm80_attention");
        args = dense(shape);
        const int64_t below = 2048 * (args.*array).strides[1] * 2;
        (args.*array).data = reinterpret_cast<void*>(below + 16);
        EXPECT_EQ(kind_of(args), "sm90_attention");
        (args.*array).data = reinterpret_cast<void*>(below);
        EXPECT_EQ(kind_of(args), "sm80_attention");
        EXPECT_NE(why_not(args, "sm90_attention").find("is shown 2048 tokens below the first of"),
                  std::string::npos);
    }
    // A bound above the number of all queries says nothing.
    shape = {4, 2048};
    shape.queries = 64;
    PagedAttentionArgs bounded = paged(shape);
    bounded.batch_invariant = true;
    bounded.max_seqlen_q = 1 << 20;
    bounded.q.data = bounded.out.data = reinterpret_cast<void*>(uintptr_t{1} << 30);
    EXPECT_EQ(kind_of(bounded), "sm90_attention");
    for (double scale : {0.0, -0.1}) {
        for (int64_t head_dim : {128, 512}) {
            shape.head_dim = head_dim;
            AttentionArgs args = dense(shape);
            args.softmax_scale = scale;
            EXPECT_EQ(kind_of(args), "sm80_attention") << "Hopper's kernels scale what they have masked";
        }
    }
}

// What Hopper's kernel cannot count, no launch takes.
TEST(Plan, MoreRowTilesThanALaunchTakes) {
    Shape shape{2, 64, 32, 1};
    shape.queries = 64;
    AttentionParams p = checked(dense(shape));
    p.batch = 1 << 12;
    p.seqlen_q = 1 << 20;
    const Gpu& gpu = *cuda::find_gpu("h200");
    std::string why_not;
    EXPECT_TRUE(cuda::plan_sm90_attention(p, gpu, &why_not)) << why_not;
    p.batch <<= 9;
    EXPECT_FALSE(cuda::plan_sm90_attention(p, gpu, &why_not));
    EXPECT_EQ(why_not.find("it counts row tiles in 32 bits"), 0u) << why_not;
    const std::string message = message_of<ValueError>([&] { cuda::plan_kernel(p, gpu); });
    EXPECT_NE(message.find("one launch takes at most"), std::string::npos) << message;
}

TEST(Plan, OptionsThatNameAKernel) {
    PagedAttentionArgs args = paged({64, 2048});
    args.num_splits = 3;
    EXPECT_EQ(kind_of(args), "sm80_attention");
    EXPECT_EQ(field(explain(args, "h200"), "num_splits"), "3");
    args = paged({64, 8192});
    args.shared_prefix_len = 4096;
    EXPECT_EQ(kind_of(args), "shared_prefix");
    EXPECT_EQ(field(explain(args, "h200"), "num_runs"), "8");
    Shape shape{4, 2048};
    shape.queries = 2048;
    AttentionArgs dropout = dense(shape);
    dropout.dropout_p = 0.1;
    dropout.dropout_seed = 1;
    EXPECT_EQ(field(explain(dropout, "h200"), "feature"), "dropout");
    dropout.alibi_slopes = Arrays().make(DType::float32, {32});
    EXPECT_EQ(kind_of(dropout), "sm80_attention");
}

// Kernels for decoding serve it where no query sees a key past its own position, as do the instances for
// ALiBi of Hopper's kernel, which has others where some query does.
// Where something speaks for unlike lengths, or the call is long.
TEST(Plan, LooksAtLengths) {
    auto by_length = [](const PagedAttentionArgs& args) {
        const Explanation text = explain(args, "h200");
        EXPECT_EQ(kind_of(text), "sm90_attention");
        return field(text, "by_length");
    };
    Shape drafts{32, 2048};
    drafts.queries = 8;
    PagedAttentionArgs args = paged(drafts);
    EXPECT_EQ(by_length(args), "false") << "all may be as long as page_table has room for";
    args.k_pages.shape[0] = args.v_pages.shape[0] = 32 * 64;
    EXPECT_EQ(by_length(args), "true") << "half of that is the mean";
    args.window_left = 100;
    EXPECT_EQ(by_length(args), "false") << "all row tiles see as many keys";
    args.window_left = -1;
    args.batch_invariant = true;
    EXPECT_EQ(by_length(args), "false");

    Shape chunks{8, 4096};
    chunks.queries = 512;
    EXPECT_EQ(by_length(paged(chunks)), "true") << "a look is little beside it";
    Shape prompts{2, 3072};
    prompts.queries = 3072;
    EXPECT_EQ(field(explain(paged(prompts), "h200"), "warpgroups"), "3");
    EXPECT_EQ(by_length(paged(prompts)), "false") << "with splits, row tiles would not be chained";
}

TEST(Plan, SymmetricAlibi) {
    Shape shape{2, 2048};
    shape.queries = 2048;
    AttentionArgs args = dense(shape);
    args.alibi_slopes = Arrays().make(DType::float32, {32});
    args.alibi_symmetric = true;
    args.causal = false;
    EXPECT_EQ(kind_of(args), "sm90_attention");
    EXPECT_EQ(field(explain(args, "h200"), "feature"), "symmetric_alibi");
    EXPECT_EQ(field(explain(args, "h200"), "warpgroups"), "3");
    EXPECT_EQ(field(explain(args, "a100"), "feature"), "dropout");  // whose instance serves it, too
    args.window_right = 0;
    EXPECT_EQ(kind_of(args), "sm90_attention");
    args.causal = true;
    args.window_right = 7;  // which causal overrides
    EXPECT_EQ(kind_of(args), "sm90_attention");
    EXPECT_EQ(field(explain(args, "h200"), "feature"), "alibi");
    args.prefix_lens = Arrays().make(DType::int32, {2});
    EXPECT_EQ(field(explain(args, "h200"), "feature"), "symmetric_alibi");
    PagedAttentionArgs one = paged({4, 1024});
    one.alibi_slopes = Arrays().make(DType::float32, {32});
    one.alibi_symmetric = true;
    one.causal = false;
    EXPECT_EQ(kind_of(one), "split_kv_decode");
    shape = {4, 1024};
    shape.queries = 4;
    PagedAttentionArgs few = paged(shape);
    few.alibi_slopes = one.alibi_slopes;
    few.alibi_symmetric = true;
    EXPECT_EQ(kind_of(few), "split_kv_decode");
    few.causal = false;
    EXPECT_EQ(kind_of(few), "sm80_attention");
    for (const auto& [kernel, reason] : explain(few, "h200").why_not) {
        if (kernel == "shared_prefix") continue;
        if (kernel == "sm90_attention") {
            EXPECT_NE(reason.find("it would leave most of the 132 SMs without work"), std::string::npos);
            continue;
        }
        EXPECT_NE(reason.find("its ALiBi has no absolute value"), std::string::npos)
            << kernel << ": " << reason;
    }
    few.chosen_pages = Arrays().make(DType::int32, {4, 9});
    EXPECT_EQ(message_of<ValueError>([&] { explain(few, "h200"); }),
              "paged_attention: chosen_pages on a GPU are read by split_kv_decode, which cannot serve this "
              "call: its ALiBi has no absolute value, and with alibi_symmetric these queries may see keys "
              "past their own position");
}

// Where ranges change nothing any kernel serves, otherwise instances of their own.
TEST(Plan, BidirectionalRanges) {
    Shape shape{2, 2048};
    shape.queries = 2048;
    AttentionArgs args = dense(shape);
    args.causal = true;
    args.bidirectional_ranges = Arrays().make(DType::int32, {2, 3, 2});
    auto expect = [&args](const char* kernel, const char* feature) {
        EXPECT_EQ(kind_of(args), kernel);
        EXPECT_EQ(field(explain(args, "h200"), "feature"), feature);
    };
    expect("sm90_attention", "ranges");
    args.sinks = Arrays().make(DType::float32, {32});
    args.softcap = 20.0;
    expect("sm90_attention", "ranges");
    args.sinks.reset();
    args.dropout_p = 0.1;
    args.dropout_seed = 1;
    expect("sm80_attention", "ranges");
    EXPECT_EQ(why_not(args, "sm90_attention"), "no instance for bidirectional_ranges has dropout");
    args.dropout_p = 0.0;
    args.alibi_slopes = Arrays().make(DType::float32, {32});
    expect("sm80_attention", "ranges");
    EXPECT_EQ(why_not(args, "sm90_attention"), "no instance for bidirectional_ranges has ALiBi");
    args.alibi_slopes.reset();
    args.causal = false;
    expect("sm90_attention", "softcap");
    args.window_left = 100;
    expect("sm90_attention", "ranges");
    args.ranges_keep_window_left = true;
    expect("sm90_attention", "softcap");
    args.bidirectional_ranges = Arrays().make(DType::int32, {2, 0, 2});
    args.causal = true;
    expect("sm90_attention", "softcap");
    PagedAttentionArgs one = paged({4, 1024});
    one.bidirectional_ranges = Arrays().make(DType::int32, {4, 3, 2});
    EXPECT_EQ(kind_of(one), "split_kv_decode");
    one.window_left = 100;
    EXPECT_EQ(kind_of(one), "sm90_attention");
    one.ranges_keep_window_left = true;
    EXPECT_EQ(kind_of(one), "split_kv_decode");
    shape = {4, 1024};
    shape.queries = 4;
    PagedAttentionArgs few = paged(shape);
    few.bidirectional_ranges = one.bidirectional_ranges;
    EXPECT_EQ(kind_of(few), "sm90_attention");
    for (const char* kernel : {"split_kv_decode", "stream_k_decode"})
        EXPECT_NE(why_not(few, kernel).find("no instance for bidirectional_ranges"), std::string::npos);
    few.batch_invariant = true;  // without splits, but whatever the batch
    few.max_seqlen_q = 4;
    EXPECT_EQ(field(explain(few, "h200"), "num_splits"), "0");
    EXPECT_EQ(kind_of(few), "sm90_attention");
}

// Keys of 192 beside values of 128 have no instance for ranges; other head dims up to 256 have one, in the
// first row of their tiles.
TEST(Plan, BidirectionalRangesOfEveryHeadDim) {
    for (const int64_t head_dim : {64, 80, 128, 192, 256, 512}) {
        Shape shape{2, 2048};
        shape.queries = 2048;
        shape.head_dim = head_dim;
        AttentionArgs args = dense(shape);
        args.causal = true;
        args.bidirectional_ranges = Arrays().make(DType::int32, {2, 3, 2});
        EXPECT_EQ(kind_of(args), head_dim <= 256 ? "sm90_attention" : "sm80_attention");
        if (head_dim == 192) {
            shape.value_dim = 128;
            args.v = dense(shape).v;
            args.out = dense(shape).out;
            EXPECT_EQ(kind_of(args), "sm80_attention");
        }
    }
}

TEST(Plan, NothingToDo) {
    Shape shape{2, 64};
    AttentionArgs args = dense(shape);
    args.q.shape[1] = args.out.shape[1] = 0;
    EXPECT_TRUE(std::holds_alternative<cuda::NothingToDo>(plan_of(args)));
    EXPECT_EQ(kind_of(args), "none");
}

// How many sequences each launch takes.
std::vector<int32_t> launches_of(AttentionParams p) {
    std::vector<int32_t> counts;
    for (; p.batch > 0 && counts.size() < 100; p.batch -= counts.back())
        counts.push_back(cuda::num_sequences(cuda::plan_kernel(p, *cuda::find_gpu("h100"))));
    return counts;
}

TEST(Plan, MoreSequencesThanALaunchTakes) {
    PagedAttentionArgs args = paged({2500, 4096});
    EXPECT_EQ(kind_of(args), "stream_k_decode");
    EXPECT_EQ(launches_of(checked(args)), (std::vector<int32_t>{1024, 1024, 452}));
    EXPECT_NE(explain(args, "h100").summary.find("for the first 1024 of 2500 sequences"), std::string::npos);
    EXPECT_EQ(launches_of(checked(paged({2500, 100}))), (std::vector<int32_t>{1024, 1024, 452}));
    args = paged({400, 20000});  // 16 splits for each of 8 heads: of more, a launch has no more than 64 an SM
    args.batch_invariant = true;
    EXPECT_EQ(launches_of(checked(args)), (std::vector<int32_t>{66, 66, 66, 66, 66, 66, 4}));
}

TEST(Plan, SharedPrefix) {
    auto plan_with_prefix = [](Shape shape) {
        PagedAttentionArgs args = paged(shape);
        args.shared_prefix_len = 4096;
        return cuda::make_shared_prefix_plan(checked(args), *cuda::find_gpu("h200"));
    };
    const cuda::SharedPrefixPlan many_rows = plan_with_prefix({64, 8192});
    EXPECT_TRUE(std::holds_alternative<cuda::SplitKvPlan>(many_rows.behind_prefix));
    EXPECT_EQ(many_rows.num_runs, 8);
    EXPECT_TRUE(many_rows.overlaps);
    // Results over the runs, and those that are computed beside them; and the LSE of both.
    EXPECT_EQ(many_rows.out_bytes, (8 + 1) * 64 * 32 * 128 * 2);
    EXPECT_EQ(many_rows.lse_bytes, (8 + 1) * 64 * 32 * 4);
    Shape wide_values{64, 8192};
    wide_values.value_dim = 256;
    const cuda::SharedPrefixPlan apart = plan_with_prefix(wide_values);
    EXPECT_FALSE(apart.overlaps);
    EXPECT_EQ(apart.out_bytes, int64_t{apart.num_runs} * 64 * 32 * 256 * 2);
    EXPECT_EQ(apart.lse_bytes, int64_t{apart.num_runs + 1} * 64 * 32 * 4);
    EXPECT_TRUE(std::holds_alternative<cuda::StreamKPlan>(plan_with_prefix({2, 8192}).over_prefix))
        << "a run has no length on the device, which split_kv_decode would read";
    EXPECT_FALSE(plan_with_prefix({2000, 8192}).overlaps) << "behind it there are several launches";
    EXPECT_FALSE(plan_with_prefix({64, 8192, 8, 4, 64}).overlaps) << "there is no kernel of that head dim";
    EXPECT_FALSE(plan_with_prefix({4, 5120}).overlaps) << "behind it are long items, which leave no room";
    EXPECT_TRUE(std::holds_alternative<cuda::Sm80Plan>(plan_with_prefix({8, 4096}).behind_prefix))
        << "behind it there are no pages";
    Shape chunks{8, 8192};
    chunks.queries = 200;
    EXPECT_FALSE(plan_with_prefix(chunks).overlaps) << "behind it is no kernel to decode";
}

// Pages have one head dim; that of values counts all the same.
TEST(Plan, KernelThatLeavesRoomHoldsValuesToo) {
    auto tile_dims = [](int64_t head_dim, int64_t value_dim) -> std::pair<int, int> {
        Shape shape{4, 4096, 8, 4, head_dim};
        shape.queries = 512;
        shape.value_dim = value_dim;
        const auto plan = cuda::plan_sm90_attention_beside(checked(dense(shape)), *cuda::find_gpu("h200"));
        if (!plan) return {0, 0};
        EXPECT_EQ(plan->feature, cuda::Sm90Feature::beside);
        return {plan->tiles().head_dim, plan->tiles().value_dim};
    };
    for (const auto& [head_dim, value_dim] : {std::pair{128, 128}, {104, 104}, {128, 72}, {80, 128}})
        EXPECT_EQ(tile_dims(head_dim, value_dim), std::pair(128, 128)) << head_dim << " / " << value_dim;
    for (const auto& [head_dim, value_dim] :
         {std::pair{128, 136}, {128, 256}, {128, 64}, {96, 96}, {64, 128}, {192, 128}})
        EXPECT_EQ(tile_dims(head_dim, value_dim), std::pair(0, 0)) << head_dim << " / " << value_dim;
}

TEST(Plan, SharedPrefixWhereItPays) {
    auto kind_with_prefix = [](const Shape& shape, int64_t prefix) {
        PagedAttentionArgs args = paged(shape);
        args.shared_prefix_len = prefix;
        return kind_of(args);
    };
    EXPECT_EQ(kind_with_prefix({64, 4096 + 256}, 4096), "shared_prefix");
    EXPECT_EQ(kind_with_prefix({64, 1 << 17}, 4096), "shared_prefix") << "room in the table is no length";
    EXPECT_EQ(kind_with_prefix({8, 4096 + 256}, 4096), "split_kv_decode") << "little is read";
    EXPECT_EQ(kind_with_prefix({16, 1024 + 256}, 1024), "split_kv_decode");
    Shape chunks{8, 4096 + 512};
    chunks.queries = 256;
    EXPECT_EQ(kind_with_prefix(chunks, 4096), "sm90_attention") << "its products take as long";
}

TEST(Plan, SharedPrefixOverCodes) {
    auto kind_with_prefix = [](const Shape& shape, const char* gpu) {
        PagedAttentionArgs args = paged(shape);
        args.k_pages.dtype = args.v_pages.dtype = DType::int8;
        args.k_scale = args.v_scale = 0.5f;
        args.shared_prefix_len = 4096;
        return kind_of(args, gpu);
    };
    EXPECT_EQ(kind_with_prefix({64, 4096 + 256}, "h200"), "shared_prefix");
    EXPECT_EQ(kind_with_prefix({64, 4096 + 256, 8, 4, 256}, "h200"), "split_kv_decode")
        << "no instance over codes has that head dim";
    EXPECT_EQ(kind_with_prefix({64, 4096 + 256}, "a100"), "sm80_attention");
    EXPECT_EQ(kind_with_prefix({8, 4096 + 256}, "h200"), "split_kv_decode") << "little is read";
}

// Before anything is planned or launched, so that no GPU is needed.
TEST(Checks, RefuseWhatNoCudaKernelComputes) {
    AttentionArgs args = dense({1, 16, 2, 1, 64, 16, 16, 0, DType::float32});
    EXPECT_NO_THROW(check_attention(args));  // on the device meta
    for (TensorView* array : {&args.q, &args.k, &args.v, &args.out}) array->device = {DeviceType::cuda, 0};
    EXPECT_THROW(check_attention(args), TypeError);
    for (TensorView* array : {&args.q, &args.k, &args.v, &args.out}) array->dtype = DType::float16;
    EXPECT_NO_THROW(check_attention(args));
}

}  // namespace
}  // namespace octavo
