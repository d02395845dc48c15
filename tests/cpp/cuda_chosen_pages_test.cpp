// Chosen pages on CUDA against the CPU, with NaN in all that is not chosen.
#include "coded_cache.h"
#include "paged_call.h"

#include <octavo/paged_attention.h>

#include <algorithm>
#include <string>
#include <vector>

namespace octavo {
namespace {

// What goes with chosen pages, as it comes.
void pick_options(Random& random, PagedCall& call) {
    pick_masks(random, call.options);
    call.options.attention_chunk = 0;
    call.with_alibi = random.one_in(3);
    call.with_lse = !random.one_in(4);
}

void expect_right(PagedCall& call) {
    EXPECT_EQ(kind_of(call.explained()), "split_kv_decode") << call.name();
    call.run_on_cpu();
    call.expect_right(paged_attention);
    call.expect_the_same_alone(std::max<int64_t>(is_small_scale() ? call.batch : call.batch / 3, 1));
}

class CudaChosenPagesTest : public ::testing::TestWithParam<unsigned> {};

TEST_P(CudaChosenPagesTest, OneQuery) {
    Random random(GetParam());
    const DType dtype = random.pick({DType::float16, DType::bfloat16});
    const int64_t head_dim = random.pick({64, 72, 80, 96, 128, 128, 192, 256});
    const int64_t group_size = random.pick({1, 3, 4, 7, 8, head_dim > 128 ? 8 : 16});
    const int64_t num_kv_heads = scaled_heads(random.pick({1, 2, 3, 8}));
    std::vector<int32_t> lengths;
    for (int32_t b = random.pick({1, 1, 3, 40}); b > 0; --b)
        lengths.push_back(random.pick({0, 1, 15, 16, 17, 300, 1024, 2100}) + random.pick({0, 0, 5}));
    if (random.one_in(3)) lengths[0] = is_small_scale() ? 900 : 20000;
    lengths = scaled_batch(lengths, num_kv_heads, 900);
    Cache cache(random, lengths, random.pick({1, 2, 7, 8, 16, 16, 17, 64, 256}), num_kv_heads, head_dim,
                dtype);
    PagedCall call(random, cache, 1, num_kv_heads * group_size, dtype);
    pick_options(random, call);
    call.pick_chosen_pages(random);
    expect_right(call);
}

// Up to 16 rows a KV head, of which some sequences have fewer.
TEST_P(CudaChosenPagesTest, FewQueries) {
    Random random(GetParam());
    const DType dtype = random.pick({DType::float16, DType::bfloat16});
    const int64_t head_dim = random.pick({64, 80, 128, 128, 256}), most_rows = head_dim > 128 ? 8 : 16;
    const int64_t group_size = random.pick({1, 2, 4, 8}), num_kv_heads = scaled_heads(random.pick({1, 2, 8}));
    const auto seqlen_q = static_cast<int32_t>(most_rows / group_size);
    std::vector<int32_t> lengths_q, lengths_k;
    for (int32_t b = random.pick({1, 3, 40}); b > 0; --b) {
        lengths_q.push_back(static_cast<int32_t>(random.up_to(seqlen_q + 1)) - 1);
        lengths_k.push_back(lengths_q.back() + random.pick({0, 1, 9, 31, 300, 2100}));
    }
    lengths_q[0] = seqlen_q;
    lengths_k[0] += seqlen_q;
    if (is_small_scale()) {
        lengths_q.resize(std::min<size_t>(lengths_q.size(), 3));
        lengths_k.resize(lengths_q.size());
    }
    Cache cache(random, lengths_k, random.pick({1, 8, 16, 33, 64}), num_kv_heads, head_dim, dtype);
    PagedCall call(random, cache, lengths_q, num_kv_heads * group_size, dtype);
    call.options.max_seqlen_q = seqlen_q;
    pick_options(random, call);
    call.pick_chosen_pages(random);
    expect_right(call);
}

TEST_P(CudaChosenPagesTest, Codes) {
    Random random(GetParam());
    const DType dtype = random.pick({DType::float16, DType::bfloat16});
    const auto codes = random.pick(
        {cuda::Codes::e4m3, cuda::Codes::e5m2, cuda::Codes::int8, cuda::Codes::int4, cuda::Codes::int8_int4});
    const int64_t head_dim = random.pick({64, 128, 256}), num_kv_heads = scaled_heads(random.pick({1, 2, 8}));
    std::vector<int32_t> lengths;
    for (int32_t b = random.pick({1, 5, 40}); b > 0; --b) lengths.push_back(random.pick({1, 31, 300, 2100}));
    lengths = scaled_batch(lengths, num_kv_heads);
    Cache cache(random, lengths, random.pick({1, 16, 40, 64}), num_kv_heads, head_dim, dtype);
    PagedCall call(random, cache, 1, 4 * num_kv_heads, dtype);
    pick_options(random, call);
    const Layout layout = pick_layout(random);
    const Scales scales = pick_scales(random, codes);
    const CodedCache coded(random, call, codes, layout, scales);  // while every page exists
    call.pick_chosen_pages(random);
    SCOPED_TRACE(name_of(layout, scales));
    call.run_on_cpu();
    call.expect_right([&](const PagedAttentionArgs& args) { cuda::attention(coded.params(args), nullptr); });
}

// A list of int64 with strides of its own.
TEST(CudaChosenPages, Int64InAView) {
    Random random(1);
    Cache cache(random, {300, 77, 1000}, 16, 2, 128, DType::bfloat16);
    PagedCall call(random, cache, 1, 8, DType::bfloat16);
    call.pick_chosen_pages(random);
    call.run_on_cpu();
    const int64_t heads = call.chosen_of_heads ? 2 : 1, room = call.num_chosen + 3;
    std::vector<int64_t> lists(call.batch * heads * room, 0);
    for (int64_t i = 0; i < call.batch * heads; ++i) {
        for (int64_t j = 0; j < call.num_chosen; ++j)
            lists[i * room + j] = call.chosen_pages->host[i * call.num_chosen + j];
    }
    const Mirror<int64_t> wide(lists);
    call.expect_right([&](PagedAttentionArgs args) {
        TensorView view = wide.on_gpu(DType::int64, {call.batch, heads, room});
        view.shape[2] = call.num_chosen;
        if (!call.chosen_of_heads) {
            view = wide.on_gpu(DType::int64, {call.batch, room});
            view.shape[1] = call.num_chosen;
        }
        args.chosen_pages = view;
        paged_attention(args);
    });
}

// A captured graph follows the lists.
TEST(CudaChosenPages, Graph) {
    Random random(2);
    Cache cache(random, {500, 900, 33}, 16, 2, 64, DType::float16);
    PagedCall call(random, cache, 1, 8, DType::float16);
    call.num_chosen = 4;
    call.chosen_of_heads = true;
    const std::vector<int32_t> first{0, 3,  7,  31, 1, 2, -1, -1, 5, 6,  50, 56,
                                     0, -1, -1, -1, 0, 2, -1, -1, 1, -1, -1, -1};
    std::vector<int32_t> second(first.size(), -1);
    for (size_t i = 0; i < second.size(); i += 4) second[i] = first[i] == 0 ? 1 : 0;
    call.chosen_pages.emplace(first);
    cudaStream_t stream = nullptr;
    ASSERT_EQ(cudaStreamCreate(&stream), cudaSuccess);
    PagedAttentionArgs args = call.on_gpu();
    args.stream = stream;
    paged_attention(args);  // makes the workspace
    cudaGraph_t graph = nullptr;
    cudaGraphExec_t executable = nullptr;
    ASSERT_EQ(cudaStreamSynchronize(stream), cudaSuccess);
    ASSERT_EQ(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), cudaSuccess);
    paged_attention(args);
    ASSERT_EQ(cudaStreamEndCapture(stream, &graph), cudaSuccess);
    ASSERT_EQ(cudaGraphInstantiate(&executable, graph, 0), cudaSuccess);
    for (const auto& lists : {first, second}) {
        call.chosen_pages->set(lists);
        call.poison_outputs();
        ASSERT_EQ(cudaGraphLaunch(executable, stream), cudaSuccess);
        ASSERT_EQ(cudaStreamSynchronize(stream), cudaSuccess);
        call.run_on_cpu();
        call.expect_what_the_cpu_gave();
    }
    cudaGraphExecDestroy(executable);
    cudaGraphDestroy(graph);
    cudaStreamDestroy(stream);
}

INSTANTIATE_TEST_SUITE_P(Seeds, CudaChosenPagesTest, ::testing::Range(0u, 40u));

}  // namespace
}  // namespace octavo
