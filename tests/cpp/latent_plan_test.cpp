// How latent_attention cuts its work on GPUs: pure functions, which need none.
#include "plan_testing.h"

#include "cuda/latent/plan.h"

#include <octavo/latent_attention.h>

#include <optional>
#include <utility>

namespace octavo {
namespace {

// A call with one query a sequence, or with `max_seqlen_q` at most and `total_q` in all.
LatentAttentionArgs latent(int64_t batch, int64_t heads, int64_t keys, bool is_fp8 = false,
                           std::optional<int64_t> max_seqlen_q = {}, int64_t total_q = 0) {
    Arrays arrays;
    LatentAttentionArgs args;
    if (max_seqlen_q) {
        args.cu_seqlens_q = arrays.make(DType::int32, {batch + 1});
        args.max_seqlen_q = max_seqlen_q;
    } else {
        total_q = batch;
    }
    args.q = arrays.make(DType::bfloat16, {total_q, heads, 576});
    args.kv_pages =
        arrays.make(is_fp8 ? DType::float8_e4m3fn : DType::bfloat16, {batch * keys / 64, 64, 576});
    args.page_table = arrays.make(DType::int32, {batch, keys / 64});
    args.seq_lens = arrays.make(DType::int32, {batch});
    args.out = arrays.make(DType::bfloat16, {total_q, heads, 512});
    args.softmax_scale = 0.1;
    return args;
}

std::string ctas(const LatentAttentionArgs& args, const char* gpu) {
    const Explanation text = explain(args, gpu);
    return field(text, "num_row_tiles") + " x " + field(text, "num_splits");
}

TEST(LatentPlan, FillsTheGpu) {
    EXPECT_EQ(ctas(latent(8, 64, 4096), "h200"), "8 x 16");
    EXPECT_EQ(ctas(latent(128, 64, 4096), "h200"), "128 x 1");
    EXPECT_EQ(ctas(latent(1, 64, 64), "h200"), "1 x 1");
    EXPECT_EQ(ctas(latent(1, 64, 4096), "h200"), "1 x 32");
    EXPECT_EQ(ctas(latent(32, 128, 4096), "h200"), "64 x 2");
}

TEST(LatentPlan, TwoSplitsAreCombinedWithinAClusterOnHopper) {
    LatentAttentionArgs args = latent(32, 128, 4096);
    const auto cluster = [&](const char* gpu) { return field(explain(args, gpu), "cluster"); };
    const auto workspace = [&](const char* gpu) { return field(explain(args, gpu), "workspace_bytes"); };
    EXPECT_EQ(cluster("h200"), "2");
    EXPECT_EQ(workspace("h200"), "0");
    EXPECT_EQ(field(explain(args, "h200"), "num_ctas"), "128");
    EXPECT_EQ(explain(args, "h200").summary.find("combine"), std::string::npos);
    for (int64_t splits : {1, 3, 4}) {
        args.num_splits = splits;
        EXPECT_EQ(cluster("h200"), "1") << splits;
    }
    args.num_splits = 2;
    EXPECT_EQ(cluster("a100"), "1");
    EXPECT_NE(workspace("a100"), "0");
}

TEST(LatentPlan, SplitsStayWithinKeys) {
    for (int64_t keys : {64, 128, 1024, 4096, 65536}) {
        for (int64_t batch : {1, 3, 32, 131, 133, 400}) {
            const Explanation text = explain(latent(batch, 64, keys), "h200");
            EXPECT_LE(std::stoll(field(text, "num_splits")), keys / 64) << batch << " x " << keys;
        }
    }
}

TEST(LatentPlan, TilesFitInSharedMemory) {
    for (const std::string& name : explainable_gpus()) {
        const int64_t room = cuda::find_gpu(name)->shared_bytes_per_block;
        for (bool is_fp8 : {false, true}) {
            for (int64_t heads : {16, 128}) {
                const Explanation text = explain(latent(32, heads, 4096, is_fp8), name);
                EXPECT_LE(std::stoll(field(text, "shared_bytes")), room) << name;
            }
        }
    }
    LatentAttentionArgs args = latent(8, 16, 4096);
    args.softmax_scale = 0.0;  // which Hopper's own kernel does not serve
    EXPECT_EQ(field(explain(args, "h100"), "stages"), "3");
    EXPECT_EQ(field(explain(latent(8, 16, 4096), "a100"), "stages"), "2");
    EXPECT_EQ(field(explain(latent(8, 16, 4096), "l40s"), "keys"), "32");
}

TEST(LatentPlan, HopperHasItsOwnKernel) {
    const auto kernel = [](const LatentAttentionArgs& args, const char* gpu) {
        return explain(args, gpu).kernel.substr(0, explain(args, gpu).kernel.find('<'));
    };
    LatentAttentionArgs args = latent(8, 128, 4096);
    EXPECT_EQ(kernel(args, "h200"), "sm90_latent_attention");
    EXPECT_EQ(field(explain(args, "h200"), "stages"), "2");
    EXPECT_EQ(kernel(latent(1, 128, 64), "h200"), "sm90_latent_attention") << "one page";
    EXPECT_EQ(kernel(args, "a100"), "latent_attention");
    EXPECT_EQ(kernel(latent(8, 16, 4096), "h200"), "sm90_latent_attention");
    EXPECT_EQ(kernel(latent(8, 1, 4096), "h200"), "sm90_latent_attention");
    EXPECT_EQ(kernel(latent(8, 128, 4096, true), "h200"), "sm90_latent_attention") << "fp8";
    EXPECT_EQ(kernel(latent(8, 16, 4096, true), "h200"), "sm90_latent_attention") << "fp8";
    EXPECT_EQ(kernel(latent(32, 16, 4096), "h200"), "sm90_latent_attention");
    for (double scale : {0.0, -0.1}) {
        args.softmax_scale = scale;
        EXPECT_EQ(kernel(args, "h200"), "latent_attention") << "it scales scores that are masked";
    }
    args = latent(8, 128, 4096);
    const auto set_stride = [&](int64_t of_heads) {
        args.out.strides[1] = of_heads;
        args.out.strides[0] = 128 * of_heads;
    };
    set_stride(520);
    EXPECT_EQ(kernel(args, "h200"), "sm90_latent_attention");
    set_stride(516);
    EXPECT_EQ(kernel(args, "h200"), "latent_attention") << "it writes 16 bytes at a time";
}

TEST(LatentPlan, FewRowsOfManySequencesHaveAKernelOfTheirOwn) {
    const auto decodes = [](const LatentAttentionArgs& args, const char* gpu = "h200") {
        return explain(args, gpu).kernel.find("latent_decode") == 0;
    };
    LatentAttentionArgs args = latent(16, 16, 4096, true);
    EXPECT_TRUE(decodes(args));
    EXPECT_EQ(field(explain(args, "h200"), "num_ctas"), "132");
    EXPECT_EQ(field(explain(args, "h200"), "num_splits"), "0") << "the lengths decide";
    EXPECT_FALSE(decodes(args, "a100"));
    args.num_splits = 4;
    EXPECT_FALSE(decodes(args));
    EXPECT_FALSE(decodes(latent(15, 16, 4096, true))) << "few sequences";
    EXPECT_FALSE(decodes(latent(16, 17, 4096, true))) << "many rows";
    EXPECT_TRUE(decodes(latent(1024, 16, 64, true)));
    EXPECT_FALSE(decodes(latent(1025, 16, 64, true))) << "too many lengths for shared memory";
    EXPECT_FALSE(decodes(latent(32, 16, 4096))) << "16 bits, and sequences may all be alike";
    args = latent(32, 16, 4096);
    args.kv_pages.shape[0] = 1800;
    EXPECT_TRUE(decodes(args)) << "some are shorter than others";
    args = latent(16, 16, 4096);
    args.kv_pages.shape[1] = 63;  // which the copy engine cannot copy
    EXPECT_TRUE(decodes(args));
}

// latent_decode reads the first page even where no sequence has a key, and the copy engine's maps need pages.
TEST(LatentPlan, WithoutPagesKernelsServeThatReadNone) {
    for (int64_t batch : {1, 16, 32, 300}) {
        for (int64_t heads : {16, 128}) {
            for (bool is_fp8 : {false, true}) {
                LatentAttentionArgs args = latent(batch, heads, 4096, is_fp8);
                args.kv_pages.shape[0] = 0;
                const Explanation text = explain(args, "h200");
                EXPECT_EQ(text.kernel.find("sm90_latent_attention"), 0u) << batch << " x " << heads;
                EXPECT_EQ(field(text, "gathers"), is_fp8 ? "false" : "true") << "there is nothing to copy";
            }
        }
    }
}

TEST(LatentPlan, ManyRowsAreScheduledWhereSplitsWouldLeaveSmsIdle) {
    const auto is_scheduled = [](const LatentAttentionArgs& args, const char* gpu = "h200") {
        const Explanation text = explain(args, gpu);
        return text.kernel.find("sm90_latent_attention") == 0 && field(text, "num_splits") == "0";
    };
    LatentAttentionArgs args = latent(32, 128, 4096);
    EXPECT_FALSE(is_scheduled(args)) << "two splits fill the GPU";
    args.kv_pages.shape[0] = 1800;
    EXPECT_TRUE(is_scheduled(args)) << "some are shorter than others";
    EXPECT_EQ(field(explain(args, "h200"), "num_ctas"), "132") << "66 runs of two tiles of rows";
    EXPECT_EQ(field(explain(args, "h200"), "workspace_bytes"),
              std::to_string(4 * (2 * 132 * 64 * (512 + 2) + 2 * 64)));
    EXPECT_NE(explain(args, "h200").summary.find("; then combine_sm90_latent_kernel"), std::string::npos);
    args.num_splits = 2;
    EXPECT_FALSE(is_scheduled(args));
    EXPECT_TRUE(is_scheduled(latent(32, 64, 4096))) << "four splits would not combine their results";
    EXPECT_TRUE(is_scheduled(latent(48, 128, 4096))) << "four splits would take three waves";
    EXPECT_TRUE(is_scheduled(latent(100, 128, 4096, true))) << "so would one split, nearly";
    EXPECT_FALSE(is_scheduled(latent(128, 128, 4096))) << "two waves, nearly full";
    EXPECT_FALSE(is_scheduled(latent(48, 128, 4096), "a100"));
    EXPECT_FALSE(is_scheduled(latent(48, 128, 192))) << "few keys";
    args = latent(8, 128, 4096);
    args.kv_pages.shape[0] = 400;
    EXPECT_TRUE(is_scheduled(args));
    args = latent(7, 128, 4096);
    args.kv_pages.shape[0] = 300;
    EXPECT_FALSE(is_scheduled(args)) << "too many runs would share a sequence";
    EXPECT_FALSE(is_scheduled(latent(1025, 20, 4096))) << "too many lengths for shared memory";
}

// What moves 16 bytes at a time needs rows that start on as many, and pairs of results 4 bytes.
TEST(LatentPlan, RowsThatDoNotStartOn16Bytes) {
    const auto strided = [](LatentAttentionArgs args, TensorView LatentAttentionArgs::* array, int axis,
                            int64_t more) {
        TensorView& view = args.*array;
        for (int outer = 0; outer < view.ndim - 1; ++outer)
            view.strides[outer] *= 2 * (view.ndim - 1 - outer);
        view.strides[axis] += more;
        return explain(args, "h200");
    };
    const LatentAttentionArgs call = latent(8, 128, 4096), few = latent(32, 16, 4096, true);
    for (int axis : {0, 1}) {
        Explanation text = strided(call, &LatentAttentionArgs::q, axis, 8);
        EXPECT_EQ(kind_of(text), "sm90_latent_attention");
        text = strided(call, &LatentAttentionArgs::q, axis, 4);
        EXPECT_EQ(kind_of(text), "latent_attention");
        EXPECT_EQ(field(text, "q_aligned"), "false");
        EXPECT_EQ(field(text, "kv_aligned"), "true");
        EXPECT_EQ(kind_of(strided(few, &LatentAttentionArgs::q, axis, 4)), "latent_attention");
        text = strided(call, &LatentAttentionArgs::kv_pages, axis, 4);
        EXPECT_EQ(kind_of(text), "latent_attention");
        EXPECT_EQ(field(text, "kv_aligned"), "false");
        EXPECT_EQ(field(text, "q_aligned"), "true");
        EXPECT_EQ(kind_of(strided(few, &LatentAttentionArgs::kv_pages, axis, 8)), "latent_attention");
        EXPECT_EQ(kind_of(strided(call, &LatentAttentionArgs::out, axis, 4)), "latent_attention");
        EXPECT_EQ(kind_of(strided(few, &LatentAttentionArgs::out, axis, 2)), "latent_decode");
        EXPECT_EQ(kind_of(strided(few, &LatentAttentionArgs::out, axis, 1)), "latent_attention");
    }
}

// The copy engine takes positive strides of less than 2^39 elements; other pages are read key by key.
TEST(LatentPlan, PagesThatTheCopyEngineCannotCopy) {
    LatentAttentionParams call = check_latent_attention(latent(8, 128, 4096));
    const auto gathers = [&](auto set) {
        LatentAttentionParams p = call;
        set(p);
        const cuda::LatentPlan plan = cuda::plan_latent_attention(p, *cuda::find_gpu("h200"));
        EXPECT_EQ(plan.kernel, cuda::LatentKernel::sm90_latent);
        return plan.gathers;
    };
    constexpr int64_t kEnd = int64_t{1} << 39;
    for (const auto& [stride, gathered] :
         {std::pair{kEnd - 8, false}, {kEnd, true}, {0, true}, {-576, true}}) {
        EXPECT_EQ(gathers([&](auto& p) { p.kv_page_stride = stride; }), gathered) << stride;
        EXPECT_EQ(gathers([&](auto& p) { p.kv_slot_stride = stride; }), gathered) << stride;
    }
    call.num_pages = 1;
    EXPECT_FALSE(gathers([](auto& p) { p.kv_page_stride = 0; }));
}

// Tiles of keys of a schedule, and rows of a launch, are counted in 32 bits.
TEST(LatentPlan, MoreThan32BitsCount) {
    const auto decodes = [](int64_t batch, int64_t keys) {
        return kind_of(explain(latent(batch, 16, keys, true), "h200")) == "latent_decode";
    };
    EXPECT_TRUE(decodes(1024, int64_t{1} << 26));
    EXPECT_FALSE(decodes(1024, int64_t{1} << 27)) << "tiles of 64 keys of all";
    EXPECT_EQ(field(explain(latent((1 << 24) - 1, 128, 64), "h200"), "num_q_heads"), "128");
    EXPECT_THROW(explain(latent(1 << 24, 128, 64), "h200"), ValueError) << "2^31 rows";
}

// Packed queries, of which a sequence may have fewer than the bound says.
TEST(LatentPlan, RunsHaveACtaForEachTileOfRows) {
    const auto packed = [](int64_t total_q, int64_t max_seqlen_q, int64_t heads = 128, int64_t batch = 32) {
        LatentAttentionArgs args = latent(batch, heads, 4096, false, max_seqlen_q, total_q);
        args.kv_pages.shape[0] = 1000;
        return explain(args, "h200");
    };
    EXPECT_EQ(field(packed(96, 3), "num_ctas"), "132") << "22 runs of six";
    EXPECT_EQ(field(packed(96, 3), "num_splits"), "0");
    EXPECT_EQ(field(packed(84, 3), "num_splits"), "0") << "a few have fewer";
    EXPECT_NE(field(packed(83, 3), "num_splits"), "0") << "many of the CTAs would have nothing to do";
    EXPECT_EQ(field(packed(70, 2, 32, 64), "num_splits"), "0") << "one tile of rows";
    EXPECT_NE(field(packed(32 * 17, 17), "num_splits"), "0") << "34 tiles of rows";
    EXPECT_EQ(field(packed(32, 0, 16), "num_ctas"), "0") << "padding alone";
    EXPECT_EQ(field(packed(0, 1), "num_ctas"), "0");
}

TEST(LatentPlan, NamesWhatIsCompiled) {
    const auto names = cuda::latent_attention_instances();
    for (const char* gpu : {"h200", "a100", "l40s"}) {
        for (bool is_fp8 : {false, true}) {
            for (int64_t heads : {16, 128}) {
                for (int64_t batch : {8, 32, 48}) {
                    const std::string kernel = explain(latent(batch, heads, 4096, is_fp8), gpu).kernel;
                    EXPECT_EQ(std::count(names.begin(), names.end(), kernel), 1) << kernel;
                }
            }
        }
    }
}

}  // namespace
}  // namespace octavo
