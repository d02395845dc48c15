// Graphs that hold the operators: their replays, and who owns the memory that they work in.
#include "cuda/workspace.h"
#include "paged_call.h"

#include <octavo/paged_attention.h>

#include <atomic>
#include <chrono>
#include <future>
#include <set>
#include <thread>

namespace octavo {
namespace {

class CudaGraphTest : public ::testing::TestWithParam<int64_t> {};

// As part of another graph, as XLA replays it.
TEST_P(CudaGraphTest, ReplayFollowsLengthsAndTables) {
    const DType dtype = DType::bfloat16;
    const int64_t num_q_heads = 6, num_kv_heads = 2, head_dim = 64;
    Random random(7);
    Cache before(random, {40, 3, 100}, 16, num_kv_heads, head_dim, dtype);
    Cache after(random, {1, 111, 64}, 16, num_kv_heads, head_dim, dtype);
    Cache larger = before.num_pages < after.num_pages ? after : before;  // with room for either
    larger.widen(std::max(before.max_pages, after.max_pages));
    for (Cache* cache : {&before, &after}) {
        cache->widen(larger.max_pages);
        cache->k.resize(larger.k.size());
        cache->v.resize(larger.v.size());
    }
    PagedCall call(random, larger, 1, num_q_heads, dtype);
    call.with_lse = false;
    cudaStream_t stream;
    ASSERT_EQ(cudaStreamCreate(&stream), cudaSuccess);
    call.options.stream = stream;
    if (GetParam() > 0) call.options.num_splits = GetParam();
    cudaGraph_t graph, outer;
    cudaGraphNode_t node;
    cudaGraphExec_t executable;
    ASSERT_EQ(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal), cudaSuccess);
    paged_attention(call.on_gpu());
    ASSERT_EQ(cudaStreamEndCapture(stream, &graph), cudaSuccess);
    ASSERT_EQ(cudaGraphCreate(&outer, 0), cudaSuccess);
    ASSERT_EQ(cudaGraphAddChildGraphNode(&node, outer, nullptr, 0, graph), cudaSuccess);
    ASSERT_EQ(cudaGraphDestroy(graph), cudaSuccess);
    ASSERT_EQ(cudaGraphInstantiate(&executable, outer, 0), cudaSuccess);

    for (const Cache* cache : {&before, &after}) {
        call.lengths.set(cache->lengths);
        call.table.set(cache->table);
        call.k.set(cache->k);
        call.v.set(cache->v);
        call.poison_outputs();
        ASSERT_EQ(cudaGraphLaunch(executable, stream), cudaSuccess);
        ASSERT_EQ(cudaStreamSynchronize(stream), cudaSuccess);
        call.expect_what_the_cpu_gives();
    }
    cudaGraphExecDestroy(executable);
    cudaGraphDestroy(outer);
    cudaStreamDestroy(stream);
}

INSTANTIATE_TEST_SUITE_P(NumSplits, CudaGraphTest, ::testing::Values(0, 3));

class WorkspaceTest : public ::testing::Test {
  protected:
    void SetUp() override { ASSERT_EQ(cudaStreamCreate(&stream_), cudaSuccess); }
    void TearDown() override { cudaStreamDestroy(stream_); }

    void begin_capture() {
        ASSERT_EQ(cudaStreamBeginCapture(stream_, cudaStreamCaptureModeGlobal), cudaSuccess);
    }
    cudaGraph_t end_capture() {
        cudaGraph_t graph = nullptr;
        EXPECT_EQ(cudaStreamEndCapture(stream_, &graph), cudaSuccess);
        return graph;
    }
    // More than any other test asks for, so that what graphs gave back before does not fit.
    void* partial(size_t bytes = kBytes, size_t num_counters = 1) {
        return cuda::persistent_workspace(0, stream_, bytes, num_counters).partial;
    }
    void* partial_of_capture(cudaGraph_t& graph) {
        begin_capture();
        void* const pointer = partial();
        graph = end_capture();
        return pointer;
    }

    static constexpr size_t kBytes = 64 << 20;
    cudaStream_t stream_ = nullptr;
};

TEST_F(WorkspaceTest, AStreamKeepsItsOwn) {
    void* const mine = partial();
    EXPECT_EQ(partial(), mine);
    cudaStream_t other;
    ASSERT_EQ(cudaStreamCreate(&other), cudaSuccess);
    EXPECT_NE(cuda::persistent_workspace(0, other, kBytes, 1).partial, mine);
    cudaStreamDestroy(other);
}

TEST_F(WorkspaceTest, CountersAreZero) {
    const cuda::PersistentWorkspace workspace = cuda::persistent_workspace(0, stream_, 1, 5000);
    std::vector<uint32_t> counters(5000, 1);
    ASSERT_EQ(
        cudaMemcpy(counters.data(), workspace.counters, 5000 * sizeof(uint32_t), cudaMemcpyDeviceToHost),
        cudaSuccess);
    EXPECT_EQ(counters, std::vector<uint32_t>(5000));
}

TEST_F(WorkspaceTest, GrowsToServeAllCallsOfAStream) {
    partial(kBytes, 1);
    void* const grown = partial(1, 100000);
    EXPECT_EQ(partial(kBytes, 1), grown);
    EXPECT_EQ(partial(1, 100000), grown);
}

TEST_F(WorkspaceTest, StreamsOfOneCaptureHaveTheirOwn) {
    cudaStream_t other;
    cudaEvent_t fork, join;
    ASSERT_EQ(cudaStreamCreate(&other), cudaSuccess);
    ASSERT_EQ(cudaEventCreate(&fork), cudaSuccess);
    ASSERT_EQ(cudaEventCreate(&join), cudaSuccess);
    begin_capture();
    void* const mine = partial();
    EXPECT_EQ(partial(), mine);
    ASSERT_EQ(cudaEventRecord(fork, stream_), cudaSuccess);
    ASSERT_EQ(cudaStreamWaitEvent(other, fork, 0), cudaSuccess);
    EXPECT_NE(cuda::persistent_workspace(0, other, kBytes, 1).partial, mine);
    ASSERT_EQ(cudaEventRecord(join, other), cudaSuccess);
    ASSERT_EQ(cudaStreamWaitEvent(stream_, join, 0), cudaSuccess);
    cudaGraphDestroy(end_capture());
    cudaEventDestroy(fork);
    cudaEventDestroy(join);
    cudaStreamDestroy(other);
}

// All threads have the same handle for a stream of their own.
TEST_F(WorkspaceTest, ThreadsThatJoinACaptureHaveTheirOwn) {
    constexpr int kThreads = 2;
    cudaEvent_t fork, joins[kThreads];
    void* partials[kThreads];
    ASSERT_EQ(cudaEventCreate(&fork), cudaSuccess);
    for (cudaEvent_t& join : joins) ASSERT_EQ(cudaEventCreate(&join), cudaSuccess);
    begin_capture();
    ASSERT_EQ(cudaEventRecord(fork, stream_), cudaSuccess);
    std::promise<void> has_ended;
    const std::shared_future<void> ended = has_ended.get_future().share();
    std::vector<std::thread> threads;
    for (int i = 0; i < kThreads; ++i) {
        std::promise<void> has_joined;
        std::future<void> joined = has_joined.get_future();
        threads.emplace_back([&, i, ended, has_joined = std::move(has_joined)]() mutable {
            EXPECT_EQ(cudaStreamWaitEvent(cudaStreamPerThread, fork, 0), cudaSuccess);
            partials[i] = cuda::persistent_workspace(0, cudaStreamPerThread, kBytes, 1).partial;
            EXPECT_EQ(cudaEventRecord(joins[i], cudaStreamPerThread), cudaSuccess);
            has_joined.set_value();
            ended.wait();  // the stream lives until then
        });
        joined.wait();
        EXPECT_EQ(cudaStreamWaitEvent(stream_, joins[i], 0), cudaSuccess);
    }
    cudaGraphDestroy(end_capture());
    has_ended.set_value();
    for (std::thread& thread : threads) thread.join();
    EXPECT_NE(partials[0], partials[1]);
    for (cudaEvent_t join : joins) cudaEventDestroy(join);
    cudaEventDestroy(fork);
}

// What was asked for the longest time ago is freed once the work of its stream is over, and captures go on:
// later streams get its addresses.
TEST_F(WorkspaceTest, OfManyStreamsIsFreedBehindTheirWork) {
    constexpr size_t kFew = 1 << 20;
    std::vector<cudaStream_t> streams(800);
    for (cudaStream_t& stream : streams)
        ASSERT_EQ(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), cudaSuccess);
    std::set<void*> partials;
    auto partial_of = [&](cudaStream_t stream) {
        void* const partial = cuda::persistent_workspace(0, stream, kFew, 1).partial;
        partials.insert(partial);
        return partial;
    };
    void* const first = partial_of(streams[0]);
    std::atomic<bool> is_over{false};
    const cudaHostFn_t work = [](void* is_over) {
        std::this_thread::sleep_for(std::chrono::milliseconds(200));
        *static_cast<std::atomic<bool>*>(is_over) = true;
    };
    ASSERT_EQ(cudaLaunchHostFunc(streams[0], work, &is_over), cudaSuccess);
    ASSERT_EQ(cudaMemsetAsync(first, 0, kFew, streams[0]), cudaSuccess);
    begin_capture();
    for (size_t i = 1; i < streams.size(); ++i) partial_of(streams[i]);
    EXPECT_TRUE(is_over);
    cudaGraph_t graph = end_capture();
    EXPECT_NE(graph, nullptr);
    cudaGraphDestroy(graph);
    EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);
    EXPECT_LT(partials.size(), streams.size() / 2);
    for (cudaStream_t stream : streams) cudaStreamDestroy(stream);
}

// Whatever holds the graph holds the memory; then the next capture takes it over.
TEST_F(WorkspaceTest, AGraphOwnsItUntilItsLastCopyIsGone) {
    cudaGraph_t inner, outer, other;
    void* const owned = partial_of_capture(inner);
    ASSERT_EQ(cudaGraphCreate(&outer, 0), cudaSuccess);
    cudaGraphNode_t node;
    ASSERT_EQ(cudaGraphAddChildGraphNode(&node, outer, nullptr, 0, inner), cudaSuccess);
    ASSERT_EQ(cudaGraphDestroy(inner), cudaSuccess);
    EXPECT_NE(partial_of_capture(other), owned);
    cudaGraphExec_t executable;
    ASSERT_EQ(cudaGraphInstantiate(&executable, outer, 0), cudaSuccess);
    ASSERT_EQ(cudaGraphDestroy(outer), cudaSuccess);
    cudaGraph_t another;
    EXPECT_NE(partial_of_capture(another), owned);
    ASSERT_EQ(cudaGraphLaunch(executable, stream_), cudaSuccess);
    ASSERT_EQ(cudaGraphExecDestroy(executable), cudaSuccess);
    ASSERT_EQ(cudaStreamSynchronize(stream_), cudaSuccess);

    bool taken_over = false;  // CUDA calls back some time later
    for (int i = 0; i < 100 && !taken_over; ++i) {
        std::this_thread::sleep_for(std::chrono::milliseconds(20));
        cudaGraph_t graph;
        taken_over = partial_of_capture(graph) == owned;
        cudaGraphDestroy(graph);
    }
    EXPECT_TRUE(taken_over);
    cudaGraphDestroy(other);
    cudaGraphDestroy(another);
}

// Counts the free memory of the whole GPU: for a process that has it to itself.
TEST_F(WorkspaceTest, ManyCapturesTakeNoMoreMemoryThanOne) {
    cudaGraph_t graph;
    partial_of_capture(graph);
    cudaGraphDestroy(graph);
    size_t before, after, total;
    ASSERT_EQ(cudaMemGetInfo(&before, &total), cudaSuccess);
    for (int i = 0; i < 200; ++i) {
        partial_of_capture(graph);
        cudaGraphDestroy(graph);
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    ASSERT_EQ(cudaMemGetInfo(&after, &total), cudaSuccess);
    EXPECT_LT(before - std::min(before, after), 50 * kBytes);
}

}  // namespace
}  // namespace octavo
