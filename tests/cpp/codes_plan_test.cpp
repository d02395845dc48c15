// What CUDA calls of many queries over caches of codes run: plans are pure functions, and need no GPU.
#include "cuda/cache_arrays.h"
#include "cuda/decode/plain_calls.h"
#include "plan_testing.h"

#include <string>

namespace octavo {
namespace {

// Pages of int8 with one scale.
PagedAttentionArgs over_codes(const Shape& shape) {
    PagedAttentionArgs args = paged(shape);
    args.k_pages.dtype = args.v_pages.dtype = DType::int8;
    args.k_scale = args.v_scale = 0.5f;
    return args;
}

// The same over int4, which has a scale and a minimum for each token and head.
PagedAttentionArgs over_int4(const Shape& shape) {
    PagedAttentionArgs args = paged(shape);
    for (auto [pages, scales] : {std::pair(&args.k_pages, &args.k_scales), {&args.v_pages, &args.v_scales}}) {
        pages->dtype = DType::uint8;
        pages->shape[3] /= 2;
        *scales = Arrays().make(DType::float16, {pages->shape[0], pages->shape[1], pages->shape[2], 2});
    }
    args.kv_dtype = DType::int4;
    return args;
}

// A split of int4 has as many blocks at least as one of int8, and CTAs have eight warps for sixteen rows,
// too.
TEST(Plan, OneSequenceOverCodes) {
    Shape shape{1, 1024};
    for (const PagedAttentionArgs& args : {over_codes(shape), over_int4(shape)})
        EXPECT_EQ(field(explain(args, "h200"), "num_splits"), "4");
    shape.keys = 8192;
    shape.num_kv_heads = 2;
    for (int64_t group_size : {4, 16}) {
        shape.group_size = group_size;
        for (const PagedAttentionArgs& args : {over_codes(shape), over_int4(shape)}) {
            const Explanation text = explain(args, "h200");
            EXPECT_EQ(field(text, "policy"), "even");
            EXPECT_EQ(field(text, "items"), "long");
            EXPECT_EQ(field(text, "num_splits"), "32");
            EXPECT_EQ(field(text, "threads"), "256");
        }
    }
}

// Where splits are short, and combiners would find no SM, an item's last split combines its splits.
TEST(Plan, WhoCombinesOverCodes) {
    auto combiners = [](const PagedAttentionArgs& args) {
        return field(explain(args, "h200"), "combiners_per_item");
    };
    EXPECT_EQ(combiners(over_int4({1, 8192})), "0");
    EXPECT_EQ(combiners(over_codes({1, 4096})), "0");
    EXPECT_EQ(combiners(over_codes({1, 8192})), "1");
    EXPECT_EQ(combiners(over_int4({1, 16384})), "1");
    EXPECT_EQ(combiners(over_int4({1, 1024})), "1") << "all fit";
}

// Sixteen rows are short up to two blocks for each of four warps.
TEST(Plan, ShortItemsOfSixteenRowsOverCodes) {
    Shape shape{8, 256, 2, 16};
    EXPECT_EQ(field(explain(over_codes(shape), "h200"), "policy"), "even");
    shape.keys = 512;
    EXPECT_EQ(field(explain(over_codes(shape), "h200"), "policy"), "by_length");
}

// Items that leave less than two CTAs for each, up to 1024 keys at head dim 128.
TEST(Plan, AsManyItemsOverCodesAsSms) {
    auto policy = [](const Shape& shape) { return field(explain(over_codes(shape), "h200"), "policy"); };
    EXPECT_EQ(policy({16, 1024}), "by_length");
    EXPECT_EQ(policy({16, 1040}), "sized");
    auto over_int4_policy = [](const Shape& shape) {
        return field(explain(over_int4(shape), "h200"), "policy");
    };
    EXPECT_EQ(over_int4_policy({16, 1024}), "by_length");
    EXPECT_EQ(over_int4_policy({16, 704}), "even");  // less than 128 KB, for which one split is enough
    EXPECT_EQ(policy({16, 1024, 8, 4, 64}), "sized");
    EXPECT_EQ(policy({16, 1024, 8, 4, 256}), "sized");
}

// Where most sequences may be much shorter than the room, and over int4 where there is much to do in few
// items.
TEST(Plan, UnlikeLengthsOverCodesAreSharedOutEvenly) {
    auto kernel = [](const PagedAttentionArgs& args) { return kind_of(explain(args, "h200")); };
    EXPECT_EQ(kernel(over_codes({32, 15000})), "split_kv_decode");
    EXPECT_EQ(kernel(over_codes({32, 16384})), "stream_k_decode");
    EXPECT_EQ(kernel(over_codes({128, 16384})), "stream_k_decode");
    EXPECT_EQ(kernel(over_codes({32, 16384, 1})), "split_kv_decode") << "by length";
    EXPECT_EQ(kernel(over_codes({64, 4096})), "split_kv_decode");
    EXPECT_EQ(kernel(over_int4({64, 4096})), "stream_k_decode");
    EXPECT_EQ(kernel(over_int4({64, 2048})), "split_kv_decode") << "a few microseconds count";
    EXPECT_EQ(kernel(over_int4({64, 4096, 32, 1})), "split_kv_decode") << "many items";
    EXPECT_EQ(kernel(over_int4({128, 2048})), "split_kv_decode") << "short items";
    EXPECT_EQ(kernel(over_int4({64, 8192, 1, 8})), "split_kv_decode") << "few items";
    for (int64_t keys : {4096, 65536}) {
        EXPECT_EQ(kernel(over_int4({128, keys, 8, 16})), "split_kv_decode") << "two tiles of rows";
        EXPECT_EQ(kernel(over_int4({128, keys, 8, 4, 64})), "split_kv_decode") << "head dim 64";
    }
    Shape drafts{128, 65536};
    drafts.queries = 8;
    EXPECT_EQ(kernel(over_int4(drafts)), "divide_queries") << "parts of 16 rows, over which split-KV decodes";
}

TEST(Plan, CallsOverCodesWithoutOptionsArePlain) {
    const Shape shape{2, 256};
    auto plain = [&](auto change) {
        PagedAttentionArgs args = over_codes(shape);
        change(args);
        return cuda::is_plain(checked(args));
    };
    const TensorView of_heads = Arrays().make(DType::float32, {32}),
                     of_batch = Arrays().make(DType::int32, {2});
    EXPECT_TRUE(plain([](auto&) {}));
    EXPECT_FALSE(plain([](auto& args) { args.window_left = 100; }));
    EXPECT_FALSE(plain([](auto& args) { args.attention_chunk = 128; }));
    EXPECT_FALSE(plain([](auto& args) { args.softcap = 30.0; }));
    EXPECT_FALSE(plain([](auto& args) { args.softmax_phi = 1.0; }));
    EXPECT_FALSE(plain([&](auto& args) { args.softmax_phi_array = of_heads; }));
    EXPECT_FALSE(plain([&](auto& args) { args.alibi_slopes = of_heads; }));
    EXPECT_FALSE(plain([&](auto& args) { args.sinks = of_heads; }));
    EXPECT_FALSE(plain([&](auto& args) { args.prefix_lens = of_batch; }));
    EXPECT_FALSE(plain([](auto& args) { args.tree_mask = Arrays().make(DType::int32, {2, 2}); }));
    AttentionParams part = checked(over_codes(shape));
    part.most_queries = 4;
    EXPECT_FALSE(cuda::is_plain(part));
}

TEST(Plan, ManyQueriesOverCodes) {
    Shape shape{4, 2048};
    shape.queries = 128;
    EXPECT_EQ(kind_of(over_codes(shape)), "sm90_attention");
    EXPECT_EQ(kind_of(over_codes(shape), "a100"), "sm80_attention");
    shape.page_size = 5;  // no copy engine is asked
    EXPECT_EQ(kind_of(over_codes(shape)), "sm90_attention");
    PagedAttentionArgs args = over_codes(shape);
    args.v_pages.data = static_cast<char*>(args.v_pages.data) + 8;
    EXPECT_EQ(kind_of(args), "sm80_attention");
    args = over_int4(shape);  // int4 with one scale, by strides of zero, is scaled key by key
    args.k_scales->strides = args.v_scales->strides = {0, 0, 0, 1};
    EXPECT_EQ(field(explain(args, "h200"), "token_scales"), "true");
    EXPECT_EQ(field(explain(over_codes(shape), "h200"), "token_scales"), "false");
    shape.head_dim = 120;
    EXPECT_EQ(kind_of(over_codes(shape)), "sm80_attention") << "rows that 16 bytes do not divide";
}

// The same with a scale of each token and head.
PagedAttentionArgs with_scales(PagedAttentionArgs args) {
    args.k_scale = args.v_scale = std::nullopt;
    const auto& shape = args.k_pages.shape;
    args.k_scales = args.v_scales = Arrays().make(DType::float32, {shape[0], shape[1], shape[2]});
    return args;
}

// Scales may be those of tokens for keys or values alone, and the same in all pages.
TEST(Plan, ScalesOfTokens) {
    Shape shape{4, 2048};
    shape.queries = 128;
    auto token_scales = [](const PagedAttentionArgs& args) {
        return field(explain(args, "h200"), "token_scales");
    };
    const PagedAttentionArgs both = with_scales(over_codes(shape));
    EXPECT_EQ(token_scales(both), "true");
    PagedAttentionArgs args = both;
    args.k_scales.reset();
    args.k_scale = 0.5f;
    EXPECT_EQ(token_scales(args), "true");
    args = both;
    args.v_scales.reset();
    args.v_scale = 0.5f;
    EXPECT_EQ(token_scales(args), "true");
    for (int axis : {0, 1}) {  // of pages, and of tokens
        args = both;
        args.k_scales->strides[axis] = args.v_scales->strides[axis] = 0;
        EXPECT_EQ(token_scales(args), "true");
    }
    args.k_scales->strides[0] = args.v_scales->strides[0] = 0;
    EXPECT_EQ(token_scales(args), "false") << "one scale for each KV head";
    shape = {1, 1};
    shape.page_size = 1;  // axes of one scale, whose strides do not matter
    EXPECT_TRUE(cuda::has_token_scales(checked(with_scales(over_codes(shape)))));
}

// Offsets of codes are counted in 16 bytes, and those of scales in words, in 32 bits without a sign.
TEST(Plan, CodesAndScalesBeyondReach) {
    Shape shape{64, 2048};
    for (int64_t queries : {1, 128}) {
        shape.queries = queries;
        const PagedAttentionArgs call = with_scales(over_codes(shape));
        const char* const kernel = queries == 1 ? "split_kv_decode" : "sm90_attention";
        EXPECT_EQ(kind_of(call), kernel);
        for (TensorView PagedAttentionArgs::* pages :
             {&PagedAttentionArgs::k_pages, &PagedAttentionArgs::v_pages}) {
            PagedAttentionArgs args = call;
            (args.*pages).strides[0] = int64_t{1} << 22;  // 32 GB
            EXPECT_EQ(kind_of(args), kernel);
            (args.*pages).strides[0] = int64_t{1} << 24;
            EXPECT_EQ(kind_of(args), "sm80_attention");
            (args.*pages).strides[0] = -(call.*pages).strides[0];
            EXPECT_EQ(kind_of(args), "sm80_attention");
        }
        for (std::optional<TensorView> PagedAttentionArgs::* scales :
             {&PagedAttentionArgs::k_scales, &PagedAttentionArgs::v_scales}) {
            PagedAttentionArgs args = call;
            (args.*scales)->strides[0] = int64_t{1} << 18;  // 8 GB
            EXPECT_EQ(kind_of(args), kernel);
            (args.*scales)->strides[0] = int64_t{1} << 20;
            EXPECT_EQ(kind_of(args), "sm80_attention");
        }
    }
}

// A list of pages of each KV head has no place for parts of its query heads.
TEST(Plan, ChosenPagesOverCodes) {
    PagedAttentionArgs args = over_codes({4, 1024, 2, 16, 256});
    EXPECT_EQ(field(explain(args, "h200"), "group_parts"), "2");
    args.chosen_pages = Arrays().make(DType::int32, {4, 2, 9});
    EXPECT_THROW(explain(args, "h200"), ValueError);
    args = over_codes({4, 1024, 2, 8, 256});
    args.chosen_pages = Arrays().make(DType::int32, {4, 2, 9});
    EXPECT_EQ(kind_of(args), "split_kv_decode");
}

// Drafts are decoded in parts, where the decode kernels do not take all rows of a KV head at once.
TEST(Plan, DraftsOverCodes) {
    auto reason = [](const PagedAttentionArgs& args) {
        for (const auto& [kernel, why_not] : explain(args, "h100").why_not) {
            if (kernel == "divide_queries") return why_not;
        }
        return std::string("none");
    };
    auto float8 = [](PagedAttentionArgs args) {
        args.k_pages.dtype = args.v_pages.dtype = DType::float8_e4m3fn;
        return args;
    };
    Shape shape{32, 4096};
    shape.queries = 7;
    const PagedAttentionArgs args = with_scales(over_codes(shape));
    const Explanation text = explain(args, "h100");
    EXPECT_EQ(text.kernel, "divide_queries");
    EXPECT_EQ(text.summary.substr(0, text.summary.find(": ", 25)),
              "divide_queries_kernel: 32 CTAs of 128 threads, which make 2 parts of up to 4 query tokens of "
              "each sequence; then over these parts split_kv_decode<int8, head_dim 128, 16 rows>");
    EXPECT_EQ(field(text, "workspace_bytes"), std::to_string(4 * (64 * 2 + 1 + 64 * 256)));
    shape.queries = 4;
    EXPECT_EQ(kind_of(with_scales(over_codes(shape))), "split_kv_decode") << "all rows at once";
    shape.queries = 9;
    EXPECT_EQ(reason(with_scales(over_codes(shape))),
              "up to head dim 128 more than two parts do not pay, and 9 query tokens make 3");
    shape.head_dim = 256;
    EXPECT_EQ(kind_of(over_codes(shape)), "divide_queries");
    EXPECT_EQ(field(explain(over_codes(shape), "h200"), "parts"), "5");
    shape.queries = 63;
    EXPECT_EQ(field(explain(over_codes(shape), "h200"), "parts"), "32");
    shape.group_size = 16;  // query heads in parts, each with eight rows at most
    for (const auto& [queries, parts] : {std::pair{1, 2}, {2, 4}, {4, 8}}) {
        shape.queries = queries;
        const Explanation of_parts = explain(over_codes(shape), "h200");
        EXPECT_NE(of_parts.kernel.find("_decode<int8, head_dim 256, 8 rows>"), std::string::npos)
            << of_parts.to_string();
        EXPECT_EQ(field(of_parts, "group_parts"), std::to_string(parts));
        EXPECT_EQ(field(of_parts, "num_kv_heads"), std::to_string(8 * parts));
    }
    shape.queries = 5;
    EXPECT_EQ(kind_of(over_codes(shape)), "sm80_attention") << "no part has a divisor of the heads";
    shape.queries = 63;
    shape.group_size = 4;
    shape.batch = 600;  // as many at a time as have a number each in the schedule of the decode kernels
    EXPECT_EQ(field(explain(over_codes(shape), "h200"), "num_sequences"), "32");
    EXPECT_EQ(kind_of(over_codes(shape), "a100"), "sm80_attention");

    // Where converters are fast, it depends on how many SMs they keep busy.
    shape = {32, 4096};
    shape.queries = 8;
    EXPECT_EQ(kind_of(float8(with_scales(over_codes(shape)))), "divide_queries");
    EXPECT_EQ(kind_of(over_codes(shape)), "divide_queries");
    EXPECT_EQ(reason(float8(over_codes(shape))),
              "over float8_e4m3fn with static scales, where items are split, it pays for up to 132 KV heads "
              "of sequences, and these are 256");
    shape.batch = 16;
    EXPECT_EQ(kind_of(float8(over_codes(shape))), "divide_queries");
    shape.batch = 64;
    EXPECT_EQ(kind_of(float8(with_scales(over_codes(shape)))), "sm90_attention");
    EXPECT_EQ(kind_of(with_scales(over_codes(shape))), "sm90_attention");
    shape.keys = 2048;
    EXPECT_EQ(kind_of(float8(over_codes(shape))), "divide_queries") << "an item has one split";
    shape.keys = 4096;
    shape.head_dim = 64;
    EXPECT_EQ(kind_of(float8(over_codes(shape))), "divide_queries") << "likewise";

    // What a query sees has to follow from its position.
    PagedAttentionArgs other = args;
    other.causal = false;
    EXPECT_NE(reason(other).find("not causal"), std::string::npos);
    other = args;
    other.batch_invariant = true;
    EXPECT_NE(reason(other).find("with batch_invariant"), std::string::npos);
    other = args;
    other.prefix_lens = Arrays().make(DType::int32, {32});
    EXPECT_NE(reason(other).find("with prefix_lens"), std::string::npos);
    other = args;
    other.alibi_slopes = Arrays().make(DType::float32, {32, 32});
    EXPECT_EQ(reason(other), "each sequence has alibi_slopes of its own");
    other.alibi_slopes = Arrays().make(DType::float32, {32});
    EXPECT_EQ(kind_of(other), "divide_queries");

    // Keys and values of unlike head dims have no converter.
    shape = {64, 4096};
    shape.queries = 9;
    shape.value_dim = 64;
    EXPECT_EQ(field(explain(float8(over_codes(shape)), "h100"), "parts"), "3");
    shape.value_dim = 256;
    EXPECT_EQ(field(explain(over_codes(shape), "h100"), "part_queries"), "2") << "rows of the larger one";

    // Workspace is for what the page table has room for.
    shape = {32, 1 << 18};
    shape.queries = 8;
    shape.page_size = 1;
    EXPECT_EQ(field(explain(with_scales(over_codes(shape)), "h100"), "num_sequences"), "31");
    shape.batch = 1;
    shape.keys = 1 << 23;
    EXPECT_EQ(reason(with_scales(over_codes(shape))),
              "it takes up to 64 MB of workspace, and 2 copies of a row of page_table take 65");
    shape = {2, 4096};
    shape.queries = 8;
    EXPECT_EQ(reason(paged(shape)), "none") << "not spoken of over other pages";
}

// Codes become numbers once where so many rows are multiplied by each of them that this pays.
TEST(Plan, ManyMoreQueriesOverCodes) {
    auto reason = [](const PagedAttentionArgs& args) {
        for (const auto& [kernel, why_not] : explain(args, "h200").why_not) {
            if (kernel == "expand_codes") return why_not;
        }
        return std::string("none");
    };
    Shape shape{4, 4096};
    shape.queries = 4096;
    for (PagedAttentionArgs args : {over_codes(shape), with_scales(over_codes(shape))}) {
        const Explanation text = explain(args, "h200");
        EXPECT_EQ(text.kernel, "expand_codes<bfloat16, int8>");
        EXPECT_EQ(field(text, "attention"), "sm90_attention<bfloat16, head_dim 128, 192 rows>");
        EXPECT_NE(text.summary.find(
                      "expand_codes_kernel: 4 sequences x 8 KV heads x 64 CTAs for runs of 64 tokens: "
                      "2048 CTAs of 256 threads; then over the numbers "
                      "sm90_attention<bfloat16, head_dim 128, 192 rows>: "),
                  std::string::npos)
            << text.summary;
        EXPECT_EQ(field(text, "room"), "4160") << "whole tiles of 80 keys";
        EXPECT_EQ(field(text, "workspace_bytes"), std::to_string(4 * 4160 * 8 * 128 * 2 * 2 + 16));
        EXPECT_EQ(kind_of(args, "a100"), "sm80_attention");
        EXPECT_EQ(kind_of(args, "b200"), "sm80_attention");
        args.batch_invariant = true;
        EXPECT_EQ(kind_of(args), "sm90_attention");
        EXPECT_NE(reason(args).find("with batch_invariant"), std::string::npos);
    }

    // Chunks: the more is saved with each row, the fewer do.
    shape = {4, 8192};
    shape.queries = 300;
    EXPECT_EQ(kind_of(with_scales(over_codes(shape))), "expand_codes");
    EXPECT_EQ(kind_of(over_codes(shape)), "sm90_attention");
    EXPECT_EQ(reason(over_codes(shape)),
              "to turn codes into numbers once pays if each key is multiplied by at least 1536 rows, and "
              "here these "
              "are 1178 on average");
    shape.total_q = 4 * 190;  // other sequences have fewer
    EXPECT_EQ(kind_of(with_scales(over_codes(shape))), "sm90_attention");
    shape = {32, 4096};  // drafts
    shape.queries = 9;
    EXPECT_EQ(kind_of(with_scales(over_codes(shape))), "sm90_attention");

    // Above head dim 128, no kernel of Hopper's reads codes.
    shape = {4, 4096};
    shape.queries = 128;
    for (int64_t head_dim : {192, 256}) {
        shape.head_dim = head_dim;
        EXPECT_EQ(kind_of(over_codes(shape)), "expand_codes") << head_dim;
        shape.dtype = DType::float16;
    }
    shape.batch = 100;  // as many at a time as there is workspace for
    EXPECT_EQ(field(explain(over_codes(shape), "h200"), "num_sequences"), "16");

    // A window leaves few keys to each query, but all of those before it are left out, too.
    shape = {2, 32768};
    shape.queries = 1024;
    PagedAttentionArgs windowed = with_scales(over_codes(shape));
    windowed.window_left = 1023;
    EXPECT_EQ(kind_of(windowed), "expand_codes");
    windowed.window_left = 100;
    EXPECT_EQ(kind_of(windowed), "sm90_attention");

    // Workspace is for what the page table has room for.
    shape = {4, 40000};
    shape.queries = 4096;
    EXPECT_EQ(reason(over_codes(shape)),
              "it takes up to 512 MB of workspace, and 4 sequences x 40000 tokens of room in page_table x 8 "
              "KV heads take 625");

    // Products with the scales of heads have the range of float16; numbers without them are exact.
    shape = {4, 4096};
    shape.queries = 4096;
    for (DType dtype : {DType::bfloat16, DType::float16}) {
        shape.dtype = dtype;
        PagedAttentionArgs args = over_codes(shape);
        EXPECT_EQ(kind_of(args), "expand_codes");
        args.k_scale = args.v_scale = std::nullopt;
        args.k_scale_array = args.v_scale_array = Arrays().make(DType::float32, {8});
        EXPECT_EQ(kind_of(args), dtype == DType::bfloat16 ? "expand_codes" : "sm90_attention");
    }
    PagedAttentionArgs moved = over_codes(shape);
    moved.v_pages.data = static_cast<char*>(moved.v_pages.data) + 8;
    EXPECT_EQ(kind_of(moved), "sm80_attention");
    EXPECT_NE(reason(moved).find("it loads 16 bytes of codes at a time"), std::string::npos);
    EXPECT_EQ(reason(paged(shape)), "none") << "not spoken of over other pages";
}

// Sequences that decode read codes beside others whose codes become numbers.
TEST(Plan, MixedBatchesOverCodes) {
    Shape shape{64, 4096};
    shape.queries = 512;
    shape.total_q = 4 * 512 + 60;
    const Explanation text = explain(with_scales(over_codes(shape)), "h200");
    EXPECT_EQ(text.kernel, "expand_codes<bfloat16, int8>");
    EXPECT_EQ(field(text, "many_queries"), "192") << "768 rows";
    EXPECT_EQ(field(text, "few_queries"), "2") << "8 rows";
    EXPECT_EQ(field(text, "num_slots"), "10") << "that many times 192 queries";
    EXPECT_EQ(field(text, "attention"), "sm90_attention<bfloat16, head_dim 128, 192 rows>")
        << "three rounds, on as many SMs as leave some to those that decode";
    EXPECT_EQ(field(text, "sms_left"), "14");
    EXPECT_EQ(field(text, "few").find("split_kv_decode<"), 0u);
    EXPECT_EQ(field(text, "between").find("sm90_attention<bfloat16 over codes"), 0u);
    for (const char* part :
         {"up to 10 sequences of at least 192 queries x 8 KV heads",
          " beside it over the codes of sequences of up to 2 query tokens split_kv_decode<",
          "; then of the others sm90_attention<bfloat16 over codes"})
        EXPECT_NE(text.summary.find(part), std::string::npos) << part << " in " << text.summary;

    Shape longer{122, 8192};
    longer.queries = 1024;
    longer.total_q = 2 * 1024 + 120;
    const Explanation of_longer = explain(with_scales(over_codes(longer)), "h200");
    EXPECT_EQ(field(of_longer, "attention"), "sm90_attention<bfloat16, head_dim 128, 128 rows>")
        << "five rounds of 103 tiles take less time than four of 88 with 192 rows";
    EXPECT_EQ(field(of_longer, "sms_left"), "29");
    for (int64_t head_dim : {80, 96}) {  // tiles of 128 columns would compute more of them
        Shape narrow{22, 2048};
        narrow.head_dim = head_dim;
        narrow.queries = 512;
        narrow.total_q = 2 * 512 + 20;
        EXPECT_EQ(field(explain(with_scales(over_codes(narrow)), "h200"), "attention"),
                  "sm90_attention<bfloat16, head_dim 96, 192 rows>");
    }

    EXPECT_EQ(field(explain(over_codes(shape), "h200"), "many_queries"), "384") << "1536 rows";
    shape.queries = 383;
    EXPECT_EQ(kind_of(over_codes(shape)), "sm90_attention") << "no sequence has enough rows";
    shape.queries = 512;
    PagedAttentionArgs args = with_scales(over_codes(shape));
    args.window_left = 100;
    EXPECT_EQ(kind_of(args), "sm90_attention") << "no key is seen by enough rows";
    args = with_scales(over_codes(shape));
    args.batch_invariant = true;
    EXPECT_EQ(kind_of(args), "sm90_attention");
    EXPECT_EQ(kind_of(with_scales(over_codes(shape)), "a100"), "sm80_attention");

    // Those that decode have one launch.
    shape = Shape{1025, 512};
    shape.queries = 512;
    shape.total_q = 4 * 512 + 1021;
    EXPECT_EQ(kind_of(with_scales(over_codes(shape))), "sm90_attention");
    shape.batch = 1024;
    EXPECT_EQ(kind_of(with_scales(over_codes(shape))), "expand_codes");
    shape = Shape{64, 4096};

    // Where more sequences could be so long than the workspace has room for, only longer ones are converted.
    shape.keys = 8192;
    shape.queries = 2048;
    shape.total_q = 16 * 1024 + 48;
    const Explanation few_slots = explain(with_scales(over_codes(shape)), "h200");
    EXPECT_EQ(field(few_slots, "num_slots"), "16");
    EXPECT_EQ(field(few_slots, "many_queries"), std::to_string(shape.total_q / 17 + 1));

    // Where there is room for all sequences, it bounds nothing.
    shape.keys = 16384;
    shape.batch = 8;
    shape.queries = 4096;
    shape.total_q = 4096 + 7 * 1000;
    const Explanation all_have_room = explain(with_scales(over_codes(shape)), "h200");
    EXPECT_EQ(field(all_have_room, "num_slots"), "8");
    EXPECT_EQ(field(all_have_room, "many_queries"), "192") << "768 rows";
    EXPECT_LE(std::stoll(field(all_have_room, "workspace_bytes")),
              cuda::kMaxExpandedBytes + cuda::kMaxRoundingBytes);

    // Lengths that are alike, or without a bound.
    shape.keys = 4096;
    shape.batch = 4;
    for (int64_t total : {4 * 512, 4 * 400}) {
        for (int64_t longest : {int64_t{512}, total}) {
            shape.queries = longest;
            shape.total_q = total;
            const Explanation all = explain(with_scales(over_codes(shape)), "h200");
            EXPECT_EQ(kind_of(all), "expand_codes");
            EXPECT_EQ(field(all, "many_queries"), "0") << "all are converted";
        }
    }

    // Without a bound, where not all have room.
    shape = Shape{64, 16384};
    shape.queries = shape.total_q = 64 * 400;
    EXPECT_EQ(field(explain(with_scales(over_codes(shape)), "h200"), "num_slots"), "8");

    // Above head dim 128, where sm80_attention serves those between.
    shape = Shape{64, 4096};
    shape.queries = 512;
    shape.total_q = 4 * 512 + 60;
    shape.head_dim = 256;
    const Explanation wide = explain(with_scales(over_codes(shape)), "h200");
    EXPECT_EQ(wide.kernel, "expand_codes<bfloat16, int8>");
    EXPECT_EQ(field(wide, "many_queries"), std::to_string(shape.total_q / 17 + 1)) << "there is room for 16";
    EXPECT_EQ(field(wide, "few").find("split_kv_decode<int8, head_dim 256"), 0u);
    EXPECT_EQ(field(wide, "between"), "sm80_attention<bfloat16, head_dim 256, 2 stages>");

    // The parts of a batch that is too small for the SMs.
    shape = Shape{5, 1328, 2, 4};
    shape.queries = 500;
    shape.total_q = 806;
    args = with_scales(over_codes(shape));
    args.alibi_slopes = Arrays().make(DType::float32, {8});
    bool is_refused = false;
    for (const auto& [kernel, reason] : explain(args, "h200").why_not) {
        if (kernel != "expand_codes") continue;
        is_refused = true;
        EXPECT_NE(reason.find("; not for its long sequences alone, as it would leave most of the 132 SMs"),
                  std::string::npos)
            << reason;
    }
    EXPECT_TRUE(is_refused);
}

// Codes become numbers, unless keys before the windows are left out that ranges may show.
TEST(Plan, BidirectionalRangesOverCodes) {
    Shape shape{2, 2048};
    shape.queries = 512;
    PagedAttentionArgs args = paged(shape);
    args.k_pages.dtype = args.v_pages.dtype = DType::float8_e4m3fn;
    args.bidirectional_ranges = Arrays().make(DType::int32, {2, 3, 2});
    EXPECT_EQ(kind_of(args), "expand_codes");
    args.window_left = 1000;
    EXPECT_EQ(kind_of(args), "sm80_attention");
    args.ranges_keep_window_left = true;
    EXPECT_EQ(kind_of(args), "expand_codes");
    args.batch_invariant = true;
    args.max_seqlen_q = 512;
    EXPECT_EQ(kind_of(args), "sm80_attention");
}

}  // namespace
}  // namespace octavo
