// Which kernels compute gradients, without a GPU.
#include "cuda/attention_backward/plan.h"
#include "cuda/attention_backward/tile_order.h"
#include "cuda/attention_backward/workspace_rows.h"
#include "cuda/sm90_backward/turns.h"
#include "plan_testing.h"

#include <algorithm>
#include <random>
#include <set>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

namespace octavo {
namespace {

// The gradients of a call, in arrays of their own.
AttentionBackwardArgs backward_of(const AttentionArgs& forward) {
    AttentionBackwardArgs args;
    uintptr_t address = uintptr_t{1} << 56;
    auto like = [&](TensorView view) {
        address += uintptr_t{1} << 46;
        view.data = reinterpret_cast<void*>(address);
        return view;
    };
    args.q = forward.q;
    args.k = forward.k;
    args.v = forward.v;
    args.out = forward.out;
    args.dout = like(forward.out);
    args.dq = like(forward.q);
    args.dk = like(forward.k);
    args.dv = like(forward.v);
    args.lse = like(forward.q);
    args.lse.dtype = DType::float32;
    --args.lse.ndim;
    for (int axis = 0; axis < args.lse.ndim; ++axis) args.lse.strides[axis] /= forward.q.shape[args.lse.ndim];
    args.cu_seqlens_q = forward.cu_seqlens_q;
    args.cu_seqlens_k = forward.cu_seqlens_k;
    args.max_seqlen_q = forward.max_seqlen_q;
    args.max_seqlen_k = forward.max_seqlen_k;
    args.causal = forward.causal;
    return args;
}

AttentionBackwardArgs with_blocks(AttentionBackwardArgs args) {  // of the shape below
    args.block_mask = Arrays().make(DType::uint8, {1, 8, 8});
    return args;
}

Shape shape_of(int64_t head_dim) {
    Shape shape;
    shape.batch = 2;
    shape.queries = shape.keys = 1000;
    shape.head_dim = head_dim;
    return shape;
}

// The same with as many query heads, of which each has a KV head.
Shape without_groups(int64_t head_dim) {
    Shape shape = shape_of(head_dim);
    shape.num_kv_heads *= shape.group_size;
    shape.group_size = 1;
    return shape;
}

TEST(BackwardPlan, HopperServesPlainCalls) {
    for (const auto& [head_dim, of_instance] : {std::pair{8, "64"},
                                                {64, "64"},
                                                {72, "96"},
                                                {96, "96"},
                                                {104, "128"},
                                                {128, "128"},
                                                {136, "192"},
                                                {192, "192"},
                                                {256, "256"}}) {
        for (const AttentionArgs& call : {dense(shape_of(head_dim)), packed(shape_of(head_dim))}) {
            const Explanation text = explain(backward_of(call), "h100");
            EXPECT_EQ(kind_of(text), "sm90_backward") << text.to_string();
            EXPECT_EQ(field(text, "head_dim"), of_instance);
        }
    }
    const Explanation text = explain(backward_of(dense(without_groups(128))), "h200");
    EXPECT_EQ(field(text, "num_key_tiles"), "16");
    EXPECT_EQ(field(text, "num_rows"), "2048");  // whole tiles of 64 for each sequence
    EXPECT_EQ(field(text, "workspace_bytes"), std::to_string(384 + 2048 * 32 * (128 * 4 + 2 * 16)));
}

TEST(BackwardPlan, HopperComputesDqApartWhereBitsAreToBeTheSame) {
    for (int64_t head_dim : {64, 128, 192, 256}) {
        AttentionBackwardArgs args = backward_of(dense(without_groups(head_dim)));
        args.deterministic = true;
        const Explanation text = explain(args, "h100");
        EXPECT_EQ(text.kernel,
                  "sm90_backward<bfloat16, head_dim " + std::to_string(head_dim) + ", deterministic>");
        EXPECT_NE(text.summary.find("sm90_query_gradients_kernel"), std::string::npos) << text.summary;
        EXPECT_EQ(field(text, "num_query_tiles"), "16");  // of 128
        // No sums of dQ: the statistics alone.
        const int64_t rows = std::stoll(field(text, "num_rows"));
        EXPECT_EQ(field(text, "workspace_bytes"), std::to_string(128 + rows * 32 * 2 * 16));
    }
}

TEST(BackwardPlan, SumsOfDqTakeTurnsInLongCalls) {
    for (int64_t head_dim : {64, 128}) {
        Shape shape = shape_of(head_dim);
        shape.batch = 8;
        shape.queries = shape.keys = 2048;
        shape.num_kv_heads = 2048 / head_dim;
        shape.group_size = 1;
        AttentionBackwardArgs args = backward_of(dense(shape));
        args.deterministic = true;
        const std::string ordered =
            "sm90_backward<bfloat16, head_dim " + std::to_string(head_dim) + ", deterministic, ordered>";
        for (bool causal : {false, true}) {
            args.causal = causal;
            const Explanation text = explain(args, "h100");
            EXPECT_EQ(text.kernel, ordered);
            EXPECT_NE(text.summary.find("convert_dq_kernel"), std::string::npos) << text.summary;
            // Enough pairs for four steps between CTAs that take turns; under a causal mask for two, of which
            // tiles of 64 queries make both on their diagonal.
            const char* const causal_pairs = head_dim == 64 ? "17" : "1";
            EXPECT_EQ(field(text, "grouped_pairs"), causal ? causal_pairs : head_dim == 64 ? "33" : "17");
            args.deterministic = false;
            const std::string plain = field(explain(args, "h100"), "workspace_bytes");
            args.deterministic = true;
            // And whose turn it is, for 64 x 64 sums each. Plain calls convert sums beside the products, and
            // count for each sequence and KV head which tiles of keys were added.
            const int64_t sums = 8 * 2048 * 2048, counters = (32 + 8 * shape.num_kv_heads) * 4;
            EXPECT_EQ(field(text, "workspace_bytes"),
                      std::to_string(std::stoll(plain) - (counters + 127) / 128 * 128 + 128 +
                                     sums / (64 * 64) * 4));
        }
        args.window_left = 300;
        EXPECT_EQ(explain(args, "h100").kernel, ordered);
        shape.queries = 256;  // most tiles of keys begin with the same queries
        AttentionBackwardArgs few_queries = backward_of(dense(shape));
        few_queries.deterministic = few_queries.causal = true;
        EXPECT_NE(explain(few_queries, "h100").kernel, ordered);
        args.prefix_lens = Arrays().make(DType::int32, {8});
        EXPECT_NE(explain(args, "h100").kernel, ordered);  // others between the prefix and the window
        args.window_left = -1;
        EXPECT_EQ(explain(args, "h100").kernel, ordered);
        args.softcap = 30.0;
        EXPECT_EQ(kind_of(explain(args, "h100")), "sm80_backward");
    }
}

// Head dim 192: each block of 32 columns has some, and dQ is summed. Others have no such sums there.
TEST(BackwardPlan, ClustersShareTheKeysOfHeadDim192) {
    for (int64_t head_dim : {136, 160, 168, 192}) {
        const Explanation text = explain(backward_of(dense(shape_of(head_dim))), "h100");
        const bool pairs = head_dim > 160;
        EXPECT_EQ(text.kernel, pairs ? "sm90_backward<bfloat16, head_dim 192>"
                                     : "sm90_backward<bfloat16, head_dim 192, deterministic>");
        EXPECT_EQ(field(text, "num_key_tiles"), pairs ? "16" : "32");  // of 128, or of 64
        EXPECT_EQ(field(text, "num_ctas"), std::to_string(32 * 8));    // KV heads
        const int64_t rows = std::stoll(field(text, "num_rows"));
        EXPECT_EQ(field(text, "workspace_bytes"),
                  std::to_string(128 + rows * 32 * (2 * 16 + (pairs ? 192 * 4 : 0))));
    }
}

TEST(BackwardPlan, ACtaAnSmTakesTilesOfKeys) {
    Shape shape = shape_of(128);
    shape.batch = 3;
    auto ctas = [&](const char* gpu) { return field(explain(backward_of(dense(shape)), gpu), "num_ctas"); };
    EXPECT_EQ(ctas("h100"), "132");  // for 3 x 8 x 8 tiles
    shape.batch = shape.group_size = 1;
    shape.keys = shape.queries = 128 * 3;
    EXPECT_EQ(ctas("h100"), std::to_string(3 * shape.num_kv_heads));
    shape.head_dim = 256;  // a CTA for each tile of 64 keys
    EXPECT_EQ(ctas("h100"), std::to_string(6 * shape.num_kv_heads));
}

// Where tiles of keys are few, several CTAs share the query heads of a group.
TEST(BackwardPlan, GroupsAreDividedWhereTilesAreFew) {
    Shape shape = shape_of(128);
    shape.num_kv_heads = 2;
    shape.group_size = 6;
    shape.batch = 1;
    shape.queries = shape.keys = 2048;
    for (const char* gpu : {"h100", "a100"}) {
        for (bool causal : {false, true}) {
            AttentionBackwardArgs args = backward_of(dense(shape));
            args.causal = causal;
            const Explanation text = explain(args, gpu);
            const int64_t parts = std::stoll(field(text, "group_parts"));
            EXPECT_GT(parts, 1) << text.to_string();
            EXPECT_EQ(6 % parts, 0);
            EXPECT_NE(
                text.summary.find("2 KV heads x " + std::to_string(parts) + " parts of the query heads"),
                std::string::npos)
                << text.summary;
            EXPECT_NE(text.summary.find("; add_group_parts_kernel"), std::string::npos);
        }
    }
    for (TensorView AttentionBackwardArgs::* gradient :
         {&AttentionBackwardArgs::dk, &AttentionBackwardArgs::dv}) {
        AttentionBackwardArgs args = backward_of(dense(shape));
        (args.*gradient).data = static_cast<char*>((args.*gradient).data) + 2;
        EXPECT_EQ(field(explain(args, "a100"), "group_parts"), "1")
            << "parts are added up 16 bytes at a time";
    }
    shape.batch = 64;
    EXPECT_EQ(field(explain(backward_of(dense(shape)), "h100"), "group_parts"), "1");
    shape.batch = 1;
    shape.num_kv_heads = 12;
    shape.group_size = 1;
    EXPECT_EQ(field(explain(backward_of(dense(shape)), "h100"), "group_parts"), "1");
}

TEST(BackwardPlan, TheLastPairsAreMixedUnderACausalMask) {
    Shape shape = shape_of(128);
    shape.keys = shape.queries = 128 * 66;
    shape.group_size = 1;
    AttentionBackwardArgs args = backward_of(dense(shape));
    shape.head_dim = 256;
    const AttentionBackwardArgs with_head_dim_256 = backward_of(dense(shape));
    for (bool causal : {false, true}) {
        // 66 tiles a pair; two rounds of 132 CTAs are 4 pairs, as far as the L2 cache has room for them.
        args.causal = causal;
        EXPECT_EQ(field(explain(args, "h200"), "mixed_pairs"), causal ? "4" : "0");
        AttentionBackwardArgs apart = with_head_dim_256;
        apart.causal = causal;
        EXPECT_EQ(field(explain(apart, "h200"), "mixed_query_pairs"), causal ? "4" : "0");
    }
}

TEST(TileOrder, EachTileIsTakenOnce) {
    for (const auto& [tiles, pairs, mixed] :
         {std::tuple{3, 3, 2}, {1, 7, 3}, {5, 1, 1}, {4, 6, 0}, {4, 6, 6}, {128, 16, 2}}) {
        for (bool last_first : {false, true}) {
            const cuda::TileOrder order{tiles, pairs, mixed, last_first};
            std::set<std::pair<int32_t, int32_t>> taken;
            int32_t before = 0;
            for (int32_t cta = 0; cta < order.num_ctas(); ++cta) {
                const cuda::TileOrder::Place at = order.of(cta);
                ASSERT_TRUE(at.tile >= 0 && at.tile < tiles && at.pair >= 0 && at.pair < pairs);
                EXPECT_TRUE(taken.emplace(at.tile, at.pair).second);
                const int32_t rank = last_first ? tiles - 1 - at.tile : at.tile;
                if (cta < (pairs - mixed) * tiles) {
                    EXPECT_EQ(at.pair, cta / tiles);
                } else {
                    EXPECT_GE(rank, cta == (pairs - mixed) * tiles ? 0 : before);
                    before = rank;
                }
            }
            EXPECT_EQ(static_cast<int64_t>(taken.size()), order.num_ctas());
        }
    }
}

// Whom a CTA waits for has taken its tile before.
TEST(TurnOrder, TilesOfAPairFollowOneAnother) {
    for (const auto& [tiles, pairs, grouped, mixed] : {std::tuple{3, 3, 1, 2},
                                                       {1, 7, 2, 3},
                                                       {5, 1, 1, 1},
                                                       {5, 1, 1, 0},
                                                       {4, 6, 3, 0},
                                                       {4, 6, 1, 6},
                                                       {128, 16, 2, 2}}) {
        for (bool falling_first : {false, true}) {
            const cuda::TurnOrder order{tiles, pairs, grouped, mixed, falling_first};
            std::vector<int32_t> taken(pairs);
            for (int32_t cta = 0; cta < tiles * pairs; ++cta) {
                const cuda::TileOrder::Place at = order.of(cta);
                ASSERT_TRUE(at.pair >= 0 && at.pair < pairs);
                EXPECT_EQ(order.rises(cta), !falling_first || at.pair >= pairs - mixed);
                EXPECT_EQ(at.tile, order.rises(cta) ? taken[at.pair] : tiles - 1 - taken[at.pair]);
                ++taken[at.pair];
                const int32_t block = at.pair < pairs - mixed ? at.pair / grouped : pairs / grouped;
                EXPECT_EQ(block, cta < (pairs - mixed) * tiles ? cta / (grouped * tiles) : pairs / grouped);
            }
        }
    }
}

// Each tile of keys that walks a tile of queries waits for the one that walked it last, and the first for
// none.
TEST(TurnBefore, IsTheLastToWalkTheSameQueries) {
    constexpr int kKeys = 128, kQueries = 64;
    using cuda::TurnBefore;
    std::mt19937 random(1);
    auto pick = [&](int32_t begin, int32_t end) {
        return std::uniform_int_distribution(begin, end - 1)(random);
    };
    for (int i = 0; i < 20000; ++i) {
        const int32_t seqlen_q = pick(1, 900), seqlen_k = pick(1, 1500);
        Visibility see{};
        see.seqlen_k = seqlen_k;
        see.window_left = pick(0, 2) ? -1 : pick(0, 500);
        see.window_right = pick(0, 3) == 0 ? -1 : pick(0, 2) ? 0 : pick(0, 300);
        if (pick(0, 4) == 0) {
            see.attention_chunk = FastDivide::by(pick(1, 400));
            see.window_left = static_cast<int32_t>(see.attention_chunk.divisor) - 1;
            see.window_right = 0;
        }
        const bool has_prefix = pick(0, 3) == 0;
        if (has_prefix) see.prefix_len = pick(0, seqlen_k + 1);
        if (!cuda::can_take_turns(has_prefix, see.window_left)) continue;
        const int32_t key_tiles = (seqlen_k + kKeys - 1) / kKeys;
        auto queries_of = [&](int32_t key_tile) {
            const QueryRange queries(see, seqlen_q, key_tile * kKeys,
                                     std::min((key_tile + 1) * kKeys, seqlen_k));
            const bool any = queries.begin < queries.end;  // as Sm90BackwardWork
            return std::pair{queries.begin / kQueries, any ? (queries.end + kQueries - 1) / kQueries : 0};
        };
        for (bool rises : {false, true}) {
            for (int32_t tile = 0; tile * kQueries < seqlen_q; ++tile) {
                int32_t last = -1;
                for (int32_t j = 0; j < key_tiles; ++j) {
                    const int32_t own = rises ? j : key_tiles - 1 - j;
                    const auto [begin, end] = queries_of(own);
                    if (tile < begin || tile >= end) continue;
                    const TurnBefore<kKeys, kQueries> before(see, seqlen_q, own, rises);
                    ASSERT_EQ(before.walks(tile), last >= 0) << i;
                    ASSERT_TRUE(last < 0 || before.key_tile == last) << i;
                    last = own;
                }
            }
        }
    }
}

TEST(BackwardPlan, TheOthersSayWhy) {
    auto expect = [](const AttentionBackwardArgs& args, const char* gpu, const std::string& reason) {
        const Explanation text = explain(args, gpu);
        EXPECT_EQ(kind_of(text), "sm80_backward");
        ASSERT_EQ(text.why_not.size(), 1u);
        EXPECT_NE(text.why_not[0].second.find(reason), std::string::npos) << text.why_not[0].second;
    };
    const AttentionBackwardArgs plain = backward_of(dense(shape_of(128)));
    expect(plain, "a100", "sm_90a");
    const std::string no_instance = "no deterministic instance, and none of head_dim above 128, has softcap";
    AttentionBackwardArgs args = backward_of(dense(shape_of(136)));
    args.softcap = 30.0;
    expect(args, "h100", no_instance);
    args = plain;
    args.deterministic = true;
    args.softcap = 30.0;
    expect(args, "h100", no_instance);
    args = plain;
    args.deterministic = true;
    args.dq.data = static_cast<char*>(args.dq.data) + 2;
    expect(args, "h100", "the rows of dq");
    args = plain;
    args.softcap = 30.0;
    args.dropout_p = 0.1;
    args.dropout_seed = 1;
    const std::string one_option = "more than one of dropout, a softcap, ALiBi and a block_mask";
    expect(args, "h100", one_option);
    args = with_blocks(plain);
    args.softcap = 30.0;
    expect(args, "h100", one_option);
    args = with_blocks(plain);
    args.deterministic = true;
    expect(args, "h100", "no deterministic instance, and none of head_dim above 128, has blocks");
    expect(with_blocks(backward_of(dense(shape_of(192)))), "h100", "above 128, has blocks");
    args = plain;
    args.alibi_slopes = Arrays().make(DType::float32, {32});
    args.alibi_symmetric = true;
    args.causal = false;
    args.deterministic = true;
    expect(args, "h100", "no deterministic instance, and none of head_dim above 128, has symmetric_alibi");
    args = plain;
    args.causal = true;
    args.bidirectional_ranges = Arrays().make(DType::int32, {args.q.shape[0], 2, 2});
    expect(args, "h100", "no instance for bidirectional_ranges");
    args = plain;
    args.softmax_scale = -1.0;
    expect(args, "h100", "softmax_scale");
    args = plain;
    args.dv.data = static_cast<char*>(args.dv.data) + 2;
    expect(args, "h100", "the rows of dv");
    for (int axis : {0, 1, 2}) {
        args = plain;
        for (int outer = 0; outer < 3; ++outer) args.out.strides[outer] <<= 3 - outer;
        EXPECT_EQ(kind_of(explain(args, "h100")), "sm90_backward");
        args.out.strides[axis] += 4;
        expect(args, "h100", "rows of out do not start on 16 bytes");
    }
}

TEST(BackwardPlan, HopperHasInstancesOfEachFeature) {
    auto feature = [](const AttentionBackwardArgs& args) {
        const Explanation text = explain(args, "h100");
        EXPECT_EQ(kind_of(text), "sm90_backward") << text.to_string();
        return field(text, "feature");
    };
    const AttentionBackwardArgs plain = backward_of(dense(shape_of(128)));
    EXPECT_EQ(feature(plain), "none");
    AttentionBackwardArgs args = plain;
    args.softcap = 30.0;
    EXPECT_EQ(feature(args), "softcap");
    args = plain;
    args.dropout_p = 0.1;
    args.dropout_seed = 1;
    EXPECT_EQ(feature(args), "dropout");
    EXPECT_EQ(feature(with_blocks(plain)), "blocks");
    EXPECT_EQ(feature(with_blocks(backward_of(dense(shape_of(40))))), "blocks");
    // Of head dim 96 there are none: they run as part of 128.
    args = backward_of(dense(shape_of(96)));
    EXPECT_EQ(field(explain(args, "h100"), "head_dim"), "96");
    args.softcap = 30.0;
    EXPECT_EQ(feature(args), "softcap");
    EXPECT_EQ(field(explain(args, "h100"), "head_dim"), "128");
    args.softcap = 0.0;
    args.deterministic = true;
    EXPECT_EQ(field(explain(args, "h100"), "head_dim"), "128");
    Arrays arrays;
    args = plain;
    args.alibi_slopes = arrays.make(DType::float32, {32});
    EXPECT_EQ(feature(args), "alibi");
    const std::string without = field(explain(args, "h100"), "workspace_bytes");
    args.dalibi_slopes = arrays.make(DType::float32, {32});
    args.dalibi_slopes->data = reinterpret_cast<void*>(uintptr_t{1} << 55);  // not among the other results
    const Explanation text = explain(args, "h100");
    EXPECT_NE(text.summary.find("slope_gradients_kernel"), std::string::npos) << text.summary;
    // A part for each of eight warps, tiles of keys, sequences and heads.
    EXPECT_EQ(std::stoll(field(text, "workspace_bytes")), std::stoll(without) + 4 * 8 * 8 * 2 * 32);
    args = plain;
    args.alibi_slopes = arrays.make(DType::float32, {32});
    args.alibi_symmetric = true;
    args.causal = false;
    EXPECT_EQ(feature(args), "symmetric_alibi");
    // Under a causal mask it is one-sided.
    args.causal = true;
    EXPECT_EQ(feature(args), "alibi");
}

// The kernels for all GPUs add up dQ where its bits need not be the same.
TEST(BackwardPlan, SumsOfQueryGradients) {
    auto sums = [](const AttentionBackwardArgs& args) { return field(explain(args, "a100"), "sums_dq"); };
    const AttentionBackwardArgs plain = backward_of(dense(shape_of(128)));
    EXPECT_EQ(sums(plain), "true");
    AttentionBackwardArgs args = plain;
    args.dropout_p = 0.1;
    args.dropout_seed = 1;
    EXPECT_EQ(sums(args), "true");
    args.deterministic = true;
    EXPECT_EQ(sums(args), "false");
    // A float32 number for each element of q; this batch's sequences are whole tiles of queries.
    const int64_t more = std::stoll(field(explain(plain, "a100"), "workspace_bytes")) -
                         std::stoll(field(explain(args, "a100"), "workspace_bytes"));
    EXPECT_EQ(more, std::stoll(field(explain(plain, "a100"), "num_rows")) * 32 * 128 * 4);
    Arrays arrays;
    args = plain;
    args.alibi_slopes = arrays.make(DType::float32, {32});
    EXPECT_EQ(sums(args), "true");
    args.dalibi_slopes = arrays.make(DType::float32, {32});
    args.dalibi_slopes->data = reinterpret_cast<void*>(uintptr_t{1} << 55);  // not among the other results
    EXPECT_EQ(sums(args), "false");
}

// Two statistics of each query and head, dQ's sums, and what parts of groups, gradients of slopes and of
// sinks take; pieces begin at multiples of 256 bytes.
TEST(BackwardPlan, WorkspaceHoldsAllPieces) {
    Shape shape = shape_of(128);
    shape.num_kv_heads = 2;
    shape.group_size = 6;
    for (const AttentionArgs& call : {dense(shape), packed(shape)}) {
        AttentionBackwardArgs args = backward_of(call);
        args.sinks = args.alibi_slopes = Arrays().make(DType::float32, {12});
        const AttentionBackwardParams p = check_attention_backward(args);
        AttentionBackwardParams gradients = p;
        float number;  // of which nothing is read
        gradients.dsinks = gradients.dalibi_slopes = &number;
        const int64_t queries = 2 * 1000 * 12, keys = 2 * 1000 * 2;
        for (const char* name : {"a100", "h100"}) {
            const Gpu& gpu = *cuda::find_gpu(name);
            const cuda::Sm80BackwardPlan plan = cuda::plan_sm80_backward(p, gpu);
            EXPECT_EQ(plan.statistics_bytes, (2 * queries * 4 + 255) / 256 * 256);
            EXPECT_GT(plan.group_parts, 1);
            EXPECT_EQ(plan.part_bytes, (plan.group_parts * keys * 2 * 128 * 2 + 255) / 256 * 256);
            EXPECT_EQ(plan.slope_bytes + plan.sink_bytes, 0);
            EXPECT_TRUE(plan.sums_dq);
            EXPECT_EQ(plan.workspace_bytes(),
                      plan.statistics_bytes + plan.part_bytes + plan.num_rows * 12 * 128 * 4);
            const cuda::Sm80BackwardPlan with = cuda::plan_sm80_backward(gradients, gpu);
            EXPECT_FALSE(with.sums_dq);
            EXPECT_EQ(with.sink_bytes, queries * 4);
            EXPECT_EQ(with.slope_bytes, 12 * 2 * with.query_tiles * 4);
            EXPECT_EQ(with.workspace_bytes(),
                      with.statistics_bytes + with.part_bytes + with.slope_bytes + with.sink_bytes);
        }
        const auto hopper = cuda::plan_sm90_backward(gradients, *cuda::find_gpu("h100"));
        ASSERT_TRUE(hopper);
        EXPECT_GT(hopper->group_parts, 1);
        EXPECT_EQ(hopper->part_bytes, hopper->group_parts * keys * 2 * 128 * 2);
        EXPECT_EQ(hopper->sink_bytes, 12 * hopper->num_rows * 4) << "rows without a query have a term, too";
    }
    shape.num_kv_heads = 12;
    shape.group_size = 1;
    EXPECT_EQ(
        cuda::plan_sm80_backward(check_attention_backward(backward_of(dense(shape))), *cuda::find_gpu("a100"))
            .part_bytes,
        0);
}

// Whatever the lengths are, there are as many tiles as packed sequences have, and each query has a row.
TEST(BackwardPlan, PackedSequencesHaveTilesAndRowsEnough) {
    std::mt19937 random(1);
    for (int i = 0; i < 300; ++i) {
        const auto batch = static_cast<int32_t>(1 + random() % 5);
        std::vector<int32_t> offsets{0};
        int32_t longest = 1;
        for (int32_t b = 0; b < batch; ++b) {
            const auto length = static_cast<int32_t>(random() % (random() % 2 ? 5 : 600));
            longest = std::max(longest, length);
            offsets.push_back(offsets.back() + length);
        }
        const int32_t total = offsets.back();
        if (total < 2) continue;  // an axis of length 1 has no stride that the copy engine could use
        Shape shape{batch, longest, 4, 1, 8 * static_cast<int64_t>(1 + random() % 32)};
        shape.queries = longest;
        shape.total_q = total;
        AttentionArgs call = packed(shape);
        call.k.shape[0] = call.v.shape[0] = total;
        AttentionBackwardArgs args = backward_of(call);
        args.deterministic = random() % 2;
        const AttentionBackwardParams p = check_attention_backward(args);
        auto tiles_of = [&](int32_t rows) {
            int32_t count = 0;
            for (int32_t b = 0; b < batch; ++b) count += (offsets[b + 1] - offsets[b] + rows - 1) / rows;
            return count;
        };
        auto rows_of = [&](auto queries, const auto& plan) {
            constexpr int32_t kQueries = decltype(queries)::value;
            const int32_t first =
                cuda::first_workspace_row<kQueries>(plan, IndexArray{offsets.data()}, batch - 1);
            return first + (total - offsets[batch - 1] + kQueries - 1) / kQueries * kQueries;
        };
        auto expect_rows = [&](int32_t queries, const auto& plan) {
            int32_t rows = 0;
            switch (queries) {
                case 32: rows = rows_of(std::integral_constant<int32_t, 32>(), plan); break;
                case 64: rows = rows_of(std::integral_constant<int32_t, 64>(), plan); break;
                case 128: rows = rows_of(std::integral_constant<int32_t, 128>(), plan); break;
                default: ADD_FAILURE() << "tiles of " << queries << " queries";
            }
            EXPECT_GE(plan.num_rows, rows);
        };
        for (const char* name : {"a100", "sm_86"}) {
            const cuda::Sm80BackwardPlan plan = cuda::plan_sm80_backward(p, *cuda::find_gpu(name));
            EXPECT_GE(plan.num_key_tiles, tiles_of(plan.tiles().keys.rows()));
            EXPECT_GE(plan.num_query_tiles, tiles_of(plan.tiles().queries.rows()));
            if (plan.sums_dq) expect_rows(plan.tiles().keys.columns, plan);
        }
        std::string why_not;
        const auto hopper = cuda::plan_sm90_backward(p, *cuda::find_gpu("h100"), &why_not);
        ASSERT_TRUE(hopper) << why_not;
        EXPECT_GE(hopper->num_key_tiles, tiles_of(hopper->tiles().cluster_keys()));
        expect_rows(hopper->tiles().queries, *hopper);
    }
}

// Instances with dropout serve chunks, too. Rows of sums are counted in 32 bits.
TEST(BackwardPlan, WhatTheKernelsForAllGpusDoWithout) {
    AttentionBackwardArgs args = backward_of(dense(shape_of(128)));
    args.causal = true;
    EXPECT_EQ(field(explain(args, "a100"), "has_dropout"), "false");
    args.attention_chunk = 100;
    EXPECT_EQ(field(explain(args, "a100"), "has_dropout"), "true");
    AttentionBackwardParams p = check_attention_backward(backward_of(dense(shape_of(128))));
    p.seqlen_q = 1 << 18;
    for (const auto& [batch, sums] : {std::pair(1 << 12, true), {1 << 13, false}}) {
        p.batch = batch;
        p.total_q = int64_t{batch} * p.seqlen_q;
        EXPECT_EQ(cuda::plan_sm80_backward(p, *cuda::find_gpu("a100")).sums_dq, sums) << batch;
    }
}

// Tiles of the last pairs of sequence and head are mixed only where some are longer than others. Of packed
// sequences a pair is a head.
TEST(BackwardPlan, LongTilesOfKeysComeFirst) {
    for (const char* gpu : {"a100", "h100", "sm_86"}) {
        for (const AttentionArgs& call : {dense(shape_of(128)), packed(shape_of(128))}) {
            AttentionBackwardArgs args = backward_of(call);
            args.causal = true;
            const auto plan = [&] {
                return cuda::plan_sm80_backward(check_attention_backward(args), *cuda::find_gpu(gpu));
            };
            const cuda::Sm80BackwardPlan causal = plan();
            const cuda::TileOrder order = causal.key_order;
            const bool is_packed = static_cast<bool>(args.cu_seqlens_k);
            EXPECT_EQ(order.tiles, is_packed ? causal.num_key_tiles : causal.key_tiles) << gpu;
            EXPECT_EQ(order.num_ctas(),
                      int64_t{causal.num_key_tiles} * causal.num_kv_heads * causal.group_parts)
                << gpu;
            EXPECT_GT(order.mixed, 0) << gpu;
            EXPECT_LE(order.mixed, order.pairs) << gpu;
            args.deterministic = true;  // without sums, the L2 cache holds more pairs
            EXPECT_GE(plan().key_order.mixed, order.mixed) << gpu;
            args.deterministic = args.causal = false;
            EXPECT_EQ(plan().key_order.mixed, 0) << gpu;
        }
    }
}

TEST(BackwardPlan, TilesFitTheGpu) {
    for (const char* gpu : {"a100", "h100", "sm_86", "sm_89"}) {
        const cuda::Gpu& found = *cuda::find_gpu(gpu);
        for (int64_t head_dim = 8; head_dim <= 256; head_dim += 8) {
            AttentionBackwardArgs args = backward_of(dense(shape_of(head_dim)));
            args.deterministic = true;
            const cuda::Sm80BackwardPlan plan =
                cuda::plan_sm80_backward(check_attention_backward(args), found);
            const cuda::Sm80BackwardTiles& tiles = plan.tiles();
            EXPECT_GE(tiles.head_dim, head_dim);
            const auto room = static_cast<size_t>(found.shared_bytes_per_block);
            EXPECT_LE(cuda::sm80_backward_shared_bytes(tiles.head_dim, tiles.keys) +
                          cuda::sm80_backward_ds_bytes(tiles.keys),
                      room)
                << gpu << ", " << head_dim;
            EXPECT_LE(cuda::sm80_backward_shared_bytes(tiles.head_dim, tiles.queries), room)
                << gpu << ", " << head_dim;
        }
    }
}

TEST(BackwardPlan, NothingToDo) {
    Shape shape = shape_of(64);
    shape.queries = 0;
    EXPECT_EQ(kind_of(explain(backward_of(dense(shape)), "h100")), "sm80_backward");
    shape = shape_of(64);
    shape.keys = 0;
    EXPECT_EQ(field(explain(backward_of(dense(shape)), "h100"), "num_key_tiles"), "0");
}

TEST(BackwardPlan, KernelsAreThoseOfTheInstances) {
    const std::vector<std::string> instances = cuda::backward_instances(true);
    const std::set<std::string> names(instances.begin(), instances.end());
    EXPECT_EQ(names.size(), instances.size());
    for (unsigned seed = 0; seed < 200; ++seed) {
        Random random(seed);
        AttentionBackwardArgs args = backward_of(random_dense_or_packed(random));
        args.deterministic = random.one_in(2);
        const int64_t head_dim = std::max(args.q.shape[args.q.ndim - 1], args.v.shape[args.v.ndim - 1]);
        for (const char* gpu : {"h100", "a100", "sm_86"}) {
            if (head_dim > kMaxCudaGradientHeadDim) {
                EXPECT_THROW(explain(args, gpu), TypeError);
                continue;
            }
            EXPECT_EQ(names.count(explain(args, gpu).kernel), 1u);
        }
    }
}

}  // namespace
}  // namespace octavo
