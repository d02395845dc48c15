// A shared prefix on CUDA against the CPU: batches whose prefix is worked through by every kernel that can,
// and whose results are put together in every way that there is.
#include "paged_call.h"

#include <octavo/paged_attention.h>

#include <memory>
#include <ostream>
#include <string>

namespace octavo {
namespace {

struct SharedPrefixCase {
    std::string name;
    // Whether the kernel behind the prefix runs beside the one over it, at head dim 128: where that is one
    // launch of split_kv_decode that leaves room, and over it sm90_attention can have work for half of the
    // SMs.
    bool overlaps;
    int32_t prefix;
    std::vector<int32_t> own, queries;  // of each sequence: keys behind the prefix; -1: padding
    int64_t num_kv_heads, group_size, page_size = 16;
    int64_t max_seqlen_q = 0;  // of packed queries, where it is given
};

// What googletest calls a case.
void PrintTo(const SharedPrefixCase& c, std::ostream* out) { *out << c.name; }

// On a small scale a shorter prefix in front of fewer sequences.
SharedPrefixCase scaled(SharedPrefixCase c) {
    if (!is_small_scale()) return c;
    const size_t batch = c.own.size(), step = batch > 16 ? (batch + 15) / 16 : 1;
    std::vector<int32_t> own, queries;
    for (size_t i = 0; i < batch; i += step) {
        own.push_back(scaled_length(c.own[i], 300));
        if (!c.queries.empty()) queries.push_back(c.queries[i]);
    }
    c.own = own;
    c.queries = queries;
    c.num_kv_heads = scaled_heads(c.num_kv_heads);
    if (c.prefix > 512 && c.page_size < 512) c.prefix = static_cast<int32_t>(512 / c.page_size * c.page_size);
    return c;
}

struct SharedPrefixProblem {
    SharedPrefixProblem(unsigned seed, const SharedPrefixCase& c, int64_t head_dim)
        : prefix(c.prefix),
          random(seed),
          dtype(random.pick({DType::float16, DType::bfloat16})),
          cache(Cache::with_shared_prefix(random, c.prefix, c.own, c.page_size, c.num_kv_heads, head_dim,
                                          dtype)),
          call(random, cache, c.queries.empty() ? std::vector<int32_t>(c.own.size(), 1) : c.queries,
               c.num_kv_heads * c.group_size, dtype) {
        call.packed = !c.queries.empty();
        if (c.max_seqlen_q > 0) call.options.max_seqlen_q = c.max_seqlen_q;
        call.options.causal = !random.one_in(3);
        if (random.one_in(3)) call.options.softcap = 20.0;
        call.options.v_scale = random.pick({1.0f, 0.5f});
        call.with_lse = !random.one_in(3);
        call.options.shared_prefix_len = c.prefix;
        if (!call.options.causal && random.one_in(2)) call.options.window_right = random.pick({0, 1, 40});
    }

    const int32_t prefix;
    Random random;
    DType dtype;
    Cache cache;
    PagedCall call;
};

// The prefix by itself, also where the plain call would be faster, as in most of the small problems here.
void run_shared_prefix(const PagedAttentionArgs& args) {
    const AttentionParams params = check_paged_attention(args);
    cuda::run(params, cuda::make_shared_prefix_plan(params, cuda::gpu_of(0)),
              static_cast<cudaStream_t>(args.stream));
}

void expect_overlap(PagedCall& call, bool overlaps) {
    const AttentionParams params = check_paged_attention(call.on_gpu());
    const cuda::SharedPrefixPlan plan = cuda::make_shared_prefix_plan(params, cuda::gpu_of(0));
    if (is_small_scale() && !overlaps) return;  // it may: batches of several launches have become small
    EXPECT_EQ(plan.overlaps, overlaps && is_hopper()) << call.name() << ": " << describe(plan).summary;
}

class CudaSharedPrefixTest : public ::testing::TestWithParam<SharedPrefixCase> {};

TEST_P(CudaSharedPrefixTest, AgreesWithTheCpu) {
    const SharedPrefixCase c = scaled(GetParam());
    unsigned seed = GetParam().prefix;
    std::vector<int64_t> head_dims{64, 80, 128, 192, 256};
    if (is_small_scale()) head_dims = {c.overlaps ? 128 : head_dims[GetParam().own.size() % 5]};
    for (const int64_t head_dim : head_dims) {
        SharedPrefixProblem problem(seed++, c, head_dim);
        PagedCall& call = problem.call;
        expect_overlap(call, c.overlaps && head_dim == 128);
        call.run_on_cpu();
        call.expect_right(run_shared_prefix);
        if (HasFatalFailure()) return;

        SCOPED_TRACE("in place");
        call.run_on_gpu([](PagedAttentionArgs args) {  // and from there to where results are looked for
            void* const out = args.out.data;
            args.out = args.q;
            run_shared_prefix(args);
            ASSERT_EQ(
                cudaMemcpy(out, args.q.data, args.q.size() * size_of(args.q.dtype), cudaMemcpyDeviceToDevice),
                cudaSuccess);
        });
        call.expect_what_the_cpu_gave();
        if (HasFatalFailure()) return;
    }
}

std::vector<int32_t> ragged(size_t batch, int32_t most) {
    std::vector<int32_t> lengths(batch);
    for (size_t i = 0; i < batch; ++i) lengths[i] = 1 + static_cast<int32_t>(i * 37 % most);
    return lengths;
}

// Every third sequence is none.
std::vector<int32_t> with_padding(std::vector<int32_t> lengths) {
    for (size_t i = 0; i < lengths.size(); i += 3) lengths[i] = -1;
    return lengths;
}

std::vector<int32_t> drafts(size_t batch) {
    std::vector<int32_t> queries(batch);
    for (size_t i = 0; i < batch; ++i) queries[i] = 1 + static_cast<int32_t>(i % 3);
    return queries;
}

INSTANTIATE_TEST_SUITE_P(
    Cases, CudaSharedPrefixTest,
    ::testing::Values(
        SharedPrefixCase{"few_rows", false, 640, {3, 17, 200}, {}, 2, 4},
        SharedPrefixCase{"one_sequence", false, 1024, {40}, {}, 2, 8},
        SharedPrefixCase{"many_runs", true, 4096, ragged(40, 90), {}, 2, 4},
        SharedPrefixCase{"a_run_for_each_head", true, 1040, ragged(33, 300), {}, 9, 2},
        SharedPrefixCase{"long_behind_the_prefix", false, 512, ragged(6, 3000), {}, 2, 4},
        SharedPrefixCase{"by_length_behind_the_prefix", false, 1536, ragged(6, 3000), {}, 2, 4},
        SharedPrefixCase{"many_row_tiles", true, 528, ragged(300, 20), {}, 4, 4},
        SharedPrefixCase{"odd_pages", false, 605, ragged(50, 40), {}, 2, 7, 5},
        SharedPrefixCase{"large_pages", true, 3 * 520, ragged(50, 40), {}, 8, 4, 520},
        SharedPrefixCase{"padding", false, 320, {-1, 1, -1, 400, -1, 16}, {}, 3, 5},
        SharedPrefixCase{"padding_alone", false, 320, {-1, -1, -1}, {}, 3, 5},
        SharedPrefixCase{"padding_beside", true, 768, with_padding(ragged(45, 401)), {}, 3, 5},
        SharedPrefixCase{"sixteen_rows", false, 832, ragged(21, 70), {}, 2, 16},
        SharedPrefixCase{"sixteen_rows_beside", true, 832, ragged(40, 70), {}, 4, 16},
        SharedPrefixCase{"more_than_a_launch", false, 64, ragged(1030, 5), {}, 1, 2},
        SharedPrefixCase{"three_launches", false, 48, ragged(2060, 7), {}, 1, 2},
        SharedPrefixCase{"chunks", false, 512, {200, 1, 64, 300, 1, -1}, {200, 1, 0, 64, 1, 0}, 2, 4},
        SharedPrefixCase{"packed_decode", false, 768, ragged(30, 60), std::vector<int32_t>(30, 1), 4, 4},
        SharedPrefixCase{
            "packed_drafts", false, 768, {60, 9, -1, 3, 300, 2}, {3, 1, 0, 3, 2, 2}, 4, 4, 16, 3},
        SharedPrefixCase{"packed_drafts_beside", true, 768, ragged(24, 300), drafts(24), 4, 4, 16, 3}),
    [](const auto& info) { return info.param.name; });

// Calls that follow each other without a pause, of which each may start while the one before is under way:
// shared prefixes with kernels that overlap and without, and plain decoding.
class CudaSharedPrefixStreamTest : public ::testing::Test {
  protected:
    CudaSharedPrefixStreamTest() {
        const SharedPrefixCase cases[] = {
            {"", true, 1536, ragged(24, 200), {}, 4, 4},  // in place
            {"", false, 64, ragged(1030, 5), {}, 1, 2},
            {"", true, 768, with_padding(ragged(36, 700)), {}, 2, 8},
            {"", false, 512, {3, 700, -1, 90}, {}, 2, 8},
            {"", false, 768, {100, 1, 64}, {100, 1, 30}, 2, 4},
        };
        unsigned seed = 40;
        for (const SharedPrefixCase& full : cases) {
            const SharedPrefixCase c = scaled(full);
            problems_.push_back(std::make_unique<SharedPrefixProblem>(seed++, c, 128));
            expect_overlap(problems_.back()->call, c.overlaps);
        }
        problems_.push_back(std::make_unique<SharedPrefixProblem>(seed++, scaled(cases[0]), 128));
        problems_.back()->call.options.shared_prefix_len = 0;  // reads the prefix for each sequence
        EXPECT_EQ(kind_of(problems_.back()->call.explained()), "split_kv_decode");
        EXPECT_EQ(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), cudaSuccess);
        for (auto& first : problems_) {  // each follows each other one, and itself
            for (auto& second : problems_) {
                if (is_small_scale() && second != problems_.back() && second != first) continue;
                for (SharedPrefixProblem* problem : {first.get(), second.get()}) {
                    const bool in_place = problem == problems_[0].get();
                    launches_.push_back(std::make_unique<Launch>(problem->call, in_place));
                }
            }
        }
    }
    ~CudaSharedPrefixStreamTest() override { cudaStreamDestroy(stream_); }

    // One of the calls, with outputs of its own. In place it has queries of its own, which they replace.
    struct Launch {
        Launch(PagedCall& call, bool in_place)
            : call(call),
              in_place(in_place),
              out(in_place ? call.q.host : call.out.host),
              lse(call.lse.host) {}

        PagedCall& call;
        const bool in_place;
        Mirror<uint16_t> out;  // on the host NaN, or the queries
        Mirror<float> lse;
    };

    void launch_all() {
        for (auto& launch : launches_) {
            PagedAttentionArgs args = launch->call.on_gpu();
            args.stream = stream_;
            args.out.data = launch->out.on_gpu(args.out.dtype, {}).data;
            if (launch->in_place) args.q.data = args.out.data;
            if (args.lse) args.lse->data = launch->lse.on_gpu(DType::float32, {}).data;
            (args.shared_prefix_len > 0 ? run_shared_prefix : paged_attention)(args);
        }
    }
    template <class LaunchThem>
    void expect_right(LaunchThem launch_them) {
        for (auto& launch : launches_) {
            launch->out.upload(launch->out.host);
            launch->lse.upload(launch->lse.host);
        }
        ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
        launch_them();
        ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
        for (auto& problem : problems_) problem->call.run_on_cpu();
        for (size_t i = 0; i < launches_.size(); ++i) {
            SCOPED_TRACE("launch " + std::to_string(i));
            launches_[i]->call.expect_what_the_cpu_gave(
                {launches_[i]->out.fetch(), launches_[i]->lse.fetch()});
            if (HasFatalFailure()) return;
        }
    }

    std::vector<std::unique_ptr<SharedPrefixProblem>> problems_;
    std::vector<std::unique_ptr<Launch>> launches_;
    cudaStream_t stream_ = nullptr;
};

TEST_F(CudaSharedPrefixStreamTest, CallsFollowEachOther) {
    expect_right([this] { launch_all(); });
}

TEST_F(CudaSharedPrefixStreamTest, ReplaysWithOtherLengths) {
    cudaGraph_t graph;
    cudaGraphExec_t executable;
    ASSERT_EQ(cudaStreamBeginCapture(stream_, cudaStreamCaptureModeThreadLocal), cudaSuccess);
    launch_all();
    ASSERT_EQ(cudaStreamEndCapture(stream_, &graph), cudaSuccess);
    ASSERT_EQ(cudaGraphInstantiate(&executable, graph, 0), cudaSuccess);
    cudaGraphDestroy(graph);
    for (const int shorter_by : {0, 1, 13, 1000}) {
        if (is_small_scale() && shorter_by != 13) continue;
        for (auto& problem : problems_) {
            PagedCall& call = problem->call;
            const std::vector<int32_t>& captured = problem->cache.lengths;
            std::vector<int32_t> lengths(captured.size(), 0);  // as padding has
            for (size_t b = 0; b < captured.size(); ++b) {
                // At least as long as the prefix and the queries, which all lie behind it.
                const int32_t least = problem->prefix + call.num_queries(b);
                if (captured[b] >= least && (shorter_by == 0 || b % 5 != 2))
                    lengths[b] = std::max(captured[b] - shorter_by * static_cast<int>(b % 3 + 1), least);
            }
            call.lengths.set(lengths);
        }
        SCOPED_TRACE("shorter by " + std::to_string(shorter_by));
        expect_right([&] { EXPECT_EQ(cudaGraphLaunch(executable, stream_), cudaSuccess); });
        if (HasFatalFailure()) break;
    }
    cudaGraphExecDestroy(executable);
}

}  // namespace
}  // namespace octavo
