// How the decode kernels cut the work of a call, and which calls they do not serve: pure functions, which
// need no GPU.
#include "allocator_testing.h"
#include "plan_testing.h"

#include <string>
#include <utility>
#include <variant>
#include <vector>

namespace octavo {
namespace {

// What decides how a decode kernel cuts the work of an H200: "stream_k", or the policy of the split-KV
// kernel, its configuration and the splits of an item.
std::string decode_plan(const PagedAttentionArgs& args) {
    const Explanation text = explain(args, "h200");
    if (kind_of(text) == "stream_k_decode") return "stream_k";
    if (kind_of(text) != "split_kv_decode") return text.kernel;
    return field(text, "policy") + " " + field(text, "items") + " " + field(text, "num_splits");
}

TEST(Plan, DecodeOfOneSequence) {
    EXPECT_EQ(decode_plan(paged({1, 128})), "even short 1");
    EXPECT_EQ(decode_plan(paged({1, 4096})), "even long 6");  // three SMs in seven
    EXPECT_EQ(decode_plan(paged({1, 100000})), "even long 16");
    EXPECT_EQ(decode_plan(paged({1, 100000, 1, 8})), "even long 132");
    EXPECT_EQ(decode_plan(paged({1, 4096, 140, 1})), "sized short 4");  // more items than SMs
    EXPECT_EQ(decode_plan(paged({1, 1152, 32, 1})), "even long 3");     // with the combiners, 128 CTAs
    EXPECT_EQ(decode_plan(paged({1, 1360, 32, 1})), "even long 4");     // three would read too much each
}

TEST(Plan, DecodeOfFewSequences) {
    EXPECT_EQ(decode_plan(paged({4, 128})), "even short 1");
    EXPECT_EQ(decode_plan(paged({4, 4096})), "by_length long 13");
    EXPECT_EQ(decode_plan(paged({4, 20000})), "by_length long 13");
    EXPECT_EQ(decode_plan(paged({8, 2000})), "by_length long 9");
    EXPECT_EQ(decode_plan(paged({8, 4096})), "sized short 4");       // splits enough for all SMs
    EXPECT_EQ(decode_plan(paged({8, 131072})), "by_length long 9");  // more of them than 16 an SM
    Shape longest{4, (1 << 28) - 4096};
    longest.page_size = 4096;
    for (const char* plan : {"by_length long 13", "stream_k"}) {
        PagedAttentionArgs args = paged(longest);
        args.k_pages.shape[0] = args.v_pages.shape[0] = 1000;
        EXPECT_EQ(decode_plan(args), plan);
        longest.keys += 4096;  // more than CTAs by length count
    }
    PagedAttentionArgs behind_prefix = paged({4, 20000});
    behind_prefix.shared_prefix_len = 4096;
    const auto plan = cuda::make_shared_prefix_plan(checked(behind_prefix), *cuda::find_gpu("h200"));
    EXPECT_EQ(std::get<cuda::SplitKvPlan>(plan.behind_prefix).policy, cuda::SplitPolicy::sized);
    EXPECT_EQ(decode_plan(paged({32, 2000, 1, 8})), "by_length long 16");
    EXPECT_EQ(decode_plan(paged({33, 2000, 1, 8})), "sized short 4");
}

// By length, an item's last split combines its splits, unless it has not enough warps for the rows.
TEST(Plan, WhoCombines) {
    auto combiners = [](const Shape& shape) {
        return field(explain(paged(shape), "h200"), "combiners_per_item");
    };
    EXPECT_EQ(combiners({1, 4096}), "1");
    EXPECT_EQ(combiners({4, 4096}), "0");
    EXPECT_NE(explain(paged({4, 4096}), "h200").summary.find("; the last split of an item combines them: "),
              std::string::npos);
    EXPECT_EQ(combiners({4, 4096, 8, 7}), "0");
    EXPECT_EQ(combiners({32, 2000, 1, 8}), "0");
    EXPECT_EQ(combiners({32, 131072, 1, 8}), "0");  // 117 splits at most, but four in the mean
    EXPECT_EQ(combiners({4, 8192, 1, 8}), "2");
    EXPECT_EQ(combiners({64, 4096}), "1");
}

TEST(Plan, DecodeOfManySequences) {
    EXPECT_EQ(decode_plan(paged({16, 128})), "even short 1");
    EXPECT_EQ(decode_plan(paged({400, 512})), "even many 1");
    EXPECT_EQ(decode_plan(paged({64, 1024})), "even short 1");
    EXPECT_EQ(decode_plan(paged({32, 4096})), "sized short 4");
    EXPECT_EQ(decode_plan(paged({64, 4096})), "sized short 4");
    Shape drafts{8, 8192};
    drafts.queries = 4;  // sixteen rows, whose short items have the configuration of many ones
    EXPECT_EQ(decode_plan(paged(drafts)), "sized many 8");
    EXPECT_EQ(decode_plan(paged({100, 900, 2, 7, 64})), "even short 1");
    EXPECT_EQ(decode_plan(paged({256, 96, 8, 1, 64})), "even many 1");
}

// Items have one CTA each where these fill the places for them nearly twice, or most SMs if items are brief.
TEST(Plan, DecodeOfWholeItems) {
    EXPECT_EQ(decode_plan(paged({58, 2048})), "even short 1");  // 464 of 264 places
    EXPECT_EQ(decode_plan(paged({57, 2048})), "sized short 2");
    EXPECT_EQ(decode_plan(paged({58, 2112})), "sized short 2");  // more than 1 MB each
    EXPECT_EQ(decode_plan(paged({58, 1024, 8, 4, 256})), "even many 1");
    EXPECT_EQ(decode_plan(paged({16, 512})), "even short 1");  // 128 of 132 SMs
    EXPECT_EQ(decode_plan(paged({9, 512, 8, 4, 256})), "even many 1");
    EXPECT_EQ(decode_plan(paged({9, 1024, 8, 4, 64})), "even short 1");
    EXPECT_EQ(decode_plan(paged({9, 1088, 8, 4, 64})), "sized short 2");
    EXPECT_EQ(decode_plan(paged({67, 512, 1, 8})), "even short 1");
    EXPECT_EQ(decode_plan(paged({66, 512, 1, 8})), "sized short 2");       // half of the SMs
    EXPECT_EQ(decode_plan(paged({17, 4096, 8, 4, 512})), "sized many 4");  // of 2 MB
    EXPECT_EQ(decode_plan(paged({16, 4096, 8, 4, 512})), "sized many 16");
}

// Where items leave less than two CTAs for each, and are not brief, most take one and the longest ones more.
TEST(Plan, DecodeByLengthOfAsManyItemsAsSms) {
    EXPECT_EQ(decode_plan(paged({32, 2048, 4, 8})), "by_length long 2");
    EXPECT_EQ(decode_plan(paged({32, 2112, 4, 8})), "sized short 2");  // more than 1 MB each
    EXPECT_EQ(decode_plan(paged({16, 1024})), "by_length long 1");
    EXPECT_EQ(decode_plan(paged({16, 1088})), "sized short 2");  // an SM has no second CTA for a long one
    EXPECT_EQ(decode_plan(paged({17, 1024})), "even short 1");   // more items than SMs
    EXPECT_EQ(decode_plan(paged({33, 1024, 4, 8})), "even short 1");
    EXPECT_EQ(decode_plan(paged({16, 1024, 8, 4, 256})), "sized many 2");
    PagedAttentionArgs behind_prefix = paged({16, 1024});
    behind_prefix.shared_prefix_len = 256;
    const auto plan = cuda::make_shared_prefix_plan(checked(behind_prefix), *cuda::find_gpu("h200"));
    EXPECT_NE(std::get<cuda::SplitKvPlan>(plan.behind_prefix).policy, cuda::SplitPolicy::by_length);
}

// As many blocks as are chosen, in fixed splits; what the kernel does not serve, no other one does.
TEST(Plan, DecodeOfChosenPages) {
    auto chosen = [](const Shape& shape, int64_t num_chosen) {
        PagedAttentionArgs args = paged(shape);
        args.chosen_pages = Arrays().make(DType::int32, {shape.batch, shape.num_kv_heads, num_chosen});
        return args;
    };
    const PagedAttentionArgs some = chosen({32, 8192}, 128);
    EXPECT_EQ(decode_plan(some), "fixed short 4");
    EXPECT_EQ(field(explain(some, "h200"), "max_visible_blocks"), "128");
    EXPECT_EQ(field(explain(some, "h200"), "chosen_pages"), "true");
    EXPECT_EQ(field(explain(paged({32, 8192}), "h200"), "chosen_pages"), "no chosen_pages");
    EXPECT_EQ(field(explain(chosen({32, 8192}, 5000), "h200"), "max_visible_blocks"), "512");
    for (const auto& [kernel, reason] : explain(some, "h200").why_not) {
        if (kernel == "shared_prefix") continue;
        EXPECT_NE(reason.find("chosen_pages is given"), std::string::npos) << kernel << ": " << reason;
    }
    Shape rows{4, 1024};
    rows.queries = 5;
    EXPECT_THROW(explain(chosen(rows, 9), "h200"), ValueError);  // 20 rows a KV head
    rows.queries = 4;
    EXPECT_EQ(decode_plan(chosen(rows, 9)), "fixed short 1");
    EXPECT_EQ(field(explain(chosen(rows, 9), "h200"), "length_first"), "true") << "of each list";
    Shape one_query = rows;  // of a sequence alone, whose bits are to be the same
    one_query.batch = one_query.total_q = 1;
    EXPECT_EQ(explain(chosen(one_query, 9), "h200").kernel, explain(chosen(rows, 9), "h200").kernel);
    EXPECT_THROW(explain(some, "a100"), ValueError);
    PagedAttentionArgs nothing = chosen({1, 16}, 1);  // an empty cache has nothing to choose from
    nothing.k_pages.shape[0] = nothing.v_pages.shape[0] = 0;
    EXPECT_EQ(kind_of(nothing), "sm80_attention");
}

// A CTA for each split that a sequence may have: where most would have nothing to do, SMs share out the work.
TEST(Plan, DecodeOfMoreSplitsThanSixteenAnSm) {
    EXPECT_EQ(decode_plan(paged({64, 4592})), "sized short 4");
    EXPECT_EQ(decode_plan(paged({64, 4608})), "stream_k");  // five splits of 512 items
    std::string why_not;
    EXPECT_FALSE(cuda::plan_split_kv(checked(paged({64, 20000})), *cuda::find_gpu("h200"), &why_not));
    EXPECT_NE(why_not.find("more than 16 on each of 132 SMs"), std::string::npos) << why_not;
    PagedAttentionArgs args = paged({64, 20000});
    args.window_left = 1024;  // of which few are visible
    EXPECT_EQ(decode_plan(args), "even short 1");
}

TEST(Plan, DecodeWithMasks) {
    PagedAttentionArgs args = paged({1, 4096});
    args.window_left = 256;
    EXPECT_EQ(decode_plan(args), "even long 3");
    EXPECT_EQ(field(explain(args, "h200"), "max_visible_blocks"), "18");
    args.prefix_lens = Arrays().make(DType::int32, {1});
    EXPECT_EQ(decode_plan(args), "stream_k") << "blocks that do not follow each other";
    args.batch_invariant = true;
    EXPECT_EQ(decode_plan(args), "fixed long 8");
    args.window_left = -1;
    args.batch_invariant = false;
    EXPECT_EQ(decode_plan(args), "even long 6");
    EXPECT_EQ(field(explain(args, "h200"), "length_first"), "true");
    args = paged({4, 20000});
    args.window_left = 1024;
    EXPECT_EQ(decode_plan(args), "by_length long 9");
    args = paged({1, 4096});
    args.causal = false;
    args.softcap = 20.0;
    EXPECT_EQ(decode_plan(args), "even long 6");
}

// What the kernel has no instance, or no room, for.
TEST(Plan, DecodeWithOptionsThatItDoesNotServe) {
    Shape drafts{4, 4096};
    drafts.queries = 2;
    PagedAttentionArgs args = paged(drafts);
    EXPECT_EQ(kind_of(args), "split_kv_decode");
    args.attention_chunk = 100;
    for (const char* kernel : {"split_kv_decode", "stream_k_decode"}) {
        EXPECT_EQ(why_not(args, kernel),
                  "with attention_chunk it takes one query of each sequence, and these may have 2");
    }
    args = paged(drafts);
    args.tree_mask = Arrays().make(DType::int64, {8});
    EXPECT_EQ(kind_of(args), "split_kv_decode");
    args.softmax_phi_array = Arrays().make(DType::float32, {32});
    for (const char* kernel : {"split_kv_decode", "stream_k_decode"}) {
        EXPECT_EQ(why_not(args, kernel),
                  "it keeps the words of a tree mask where softmax_phi of each head would be");
    }
    const Gpu& gpu = *cuda::find_gpu("h200");
    std::string reason;
    EXPECT_TRUE(cuda::plan_split_kv(checked(paged({1, 16, 1 << 16, 1})), gpu));
    EXPECT_FALSE(cuda::plan_split_kv(checked(paged({1, 16, (1 << 16) + 1, 1})), gpu, &reason));
    EXPECT_NE(reason.find(" keys of 65537 heads"), std::string::npos) << reason;
    EXPECT_EQ(message_of<ValueError>([] { explain(paged({1, 16, 1 << 16, 1}), "a100"); }),
              "paged_attention: num_kv_heads (65536) must be at most 65535 on CUDA");
}

// Offsets are counted in 16 bytes, in 32 bits without a sign.
TEST(Plan, DecodeOfArraysOfMoreThan64GB) {
    const std::string beyond = "its offsets reach the 64 GB behind an array's first element";
    auto expect_beyond = [&](const PagedAttentionArgs& args) {
        for (const char* kernel : {"split_kv_decode", "stream_k_decode"})
            EXPECT_EQ(why_not(args, kernel).substr(0, beyond.size()), beyond);
    };
    Shape shape{4, 2048};
    for (int64_t queries : {1, 2}) {
        shape.queries = queries;
        const PagedAttentionArgs call = paged(shape);
        EXPECT_EQ(kind_of(call), "split_kv_decode");
        PagedAttentionArgs args = call;
        args.q.strides[0] = int64_t{1} << 34;
        expect_beyond(args);
        for (TensorView PagedAttentionArgs::* pages :
             {&PagedAttentionArgs::k_pages, &PagedAttentionArgs::v_pages}) {
            args = call;
            (args.*pages).strides[0] = int64_t{1} << 27;
            expect_beyond(args);
            (args.*pages).strides[0] = -(call.*pages).strides[0];
            expect_beyond(args);
        }
    }
}

// Sized splits serve a part of a batch, of which CTAs by length know nothing.
TEST(Plan, DecodeOfAPartOfABatch) {
    Shape shape{4, 20000};
    shape.queries = 2;
    const AttentionParams all = checked(paged(shape));
    const auto policy = [](const AttentionParams& p) {
        const auto plan = cuda::plan_decode_at_once(p, *cuda::find_gpu("h200"));
        return std::get<cuda::SplitKvPlan>(plan.value()).policy;
    };
    EXPECT_EQ(policy(all), cuda::SplitPolicy::by_length);
    EXPECT_EQ(policy(cuda::with_queries(all, 1, 2)), cuda::SplitPolicy::sized);
}

TEST(Plan, BatchInvariantDecode) {
    PagedAttentionArgs args = paged({64, 4096});
    args.batch_invariant = true;
    EXPECT_EQ(decode_plan(args), "fixed short 8");
    args = paged({1, 100});
    args.batch_invariant = true;
    EXPECT_EQ(decode_plan(args), "fixed short 1");
    args = paged({1, 100000});
    args.batch_invariant = true;
    EXPECT_EQ(decode_plan(args), "fixed long 16");
    args.window_left = 5000;  // up to 314 blocks
    EXPECT_EQ(decode_plan(args), "fixed long 8");
    args.window_left = 1025;
    EXPECT_EQ(decode_plan(args), "fixed long 4");
    args.window_left = 1024;  // a short one, and all of it in a row
    EXPECT_EQ(decode_plan(args), "fixed long 1");
    args.prefix_lens = Arrays().make(DType::int32, {1});
    EXPECT_EQ(decode_plan(args), "fixed long 16");
    args = paged({64, 4096, 8, 32});  // more rows than it takes
    EXPECT_EQ(kind_of(args), "sm90_attention");
    args.batch_invariant = true;
    EXPECT_EQ(kind_of(args), "sm80_attention") << "whether rows can be copied depends on the batch's stride";
}

}  // namespace
}  // namespace octavo
