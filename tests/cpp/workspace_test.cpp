// Kept workspaces over a CUDA runtime that is made of counters: every call of it fails once. Needs no GPU.
#include "cuda/workspace.h"
#include "cuda/runtime.h"

#include <octavo/error.h>

#include <gtest/gtest.h>

#include <cstdlib>
#include <future>
#include <map>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

namespace {

struct Object {
    cudaHostFn_t destroy;
    void* argument;
};

std::string failing;  // the call that fails next, once
std::set<void*> allocations;
std::set<void*> freed;  // they stay, so that no address is used twice
int num_streams = 0;
cudaStreamCaptureMode mode = cudaStreamCaptureModeGlobal;
unsigned long long capture = 0;  // that every stream is in; 0: none
std::set<Object*> objects;
std::multimap<cudaGraph_t, Object*> kept_by_graphs;

cudaError_t result_of(const char* call) {
    if (failing != call) return cudaSuccess;
    failing.clear();
    return cudaErrorUnknown;
}

cudaGraph_t graph_of(unsigned long long capture) { return reinterpret_cast<cudaGraph_t>(capture); }

void destroy(Object* object) {
    object->destroy(object->argument);
    objects.erase(object);
    delete object;
}

void end_capture() {
    const auto [begin, end] = kept_by_graphs.equal_range(graph_of(capture));
    capture = 0;
    for (auto kept = begin; kept != end; ++kept) destroy(kept->second);
    kept_by_graphs.erase(begin, end);
}

}  // namespace

extern "C" {

cudaError_t cudaMalloc(void** pointer, size_t bytes) {
    if (const cudaError_t status = result_of("cudaMalloc")) return status;
    EXPECT_EQ(mode, cudaStreamCaptureModeRelaxed);
    allocations.insert(*pointer = std::malloc(bytes));
    return cudaSuccess;
}
cudaError_t cudaFree(void* pointer) {
    EXPECT_EQ(mode, cudaStreamCaptureModeRelaxed);
    EXPECT_EQ(num_streams, 0);
    EXPECT_EQ(allocations.erase(pointer), 1u);
    freed.insert(pointer);
    return cudaSuccess;
}
cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned) {
    if (const cudaError_t status = result_of("cudaStreamCreateWithFlags")) return status;
    *stream = reinterpret_cast<cudaStream_t>(&num_streams);
    ++num_streams;
    return cudaSuccess;
}
cudaError_t cudaStreamDestroy(cudaStream_t) {
    --num_streams;
    return cudaSuccess;
}
cudaError_t cudaMemsetAsync(void*, int, size_t, cudaStream_t) { return result_of("cudaMemsetAsync"); }
cudaError_t cudaStreamSynchronize(cudaStream_t) { return result_of("cudaStreamSynchronize"); }
cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* other) {
    // Back to what it was it never fails.
    if (*other == cudaStreamCaptureModeRelaxed) {
        if (const cudaError_t status = result_of("cudaThreadExchangeStreamCaptureMode")) return status;
    }
    std::swap(mode, *other);
    return cudaSuccess;
}
cudaError_t cudaStreamGetId(cudaStream_t stream, unsigned long long* id) {
    *id = reinterpret_cast<uintptr_t>(stream);
    return result_of("cudaStreamGetId");
}
#if CUDART_VERSION >= 13000
cudaError_t cudaStreamGetCaptureInfo(cudaStream_t, cudaStreamCaptureStatus* status, unsigned long long* id,
                                     cudaGraph_t* graph, const cudaGraphNode_t**, const cudaGraphEdgeData**,
                                     size_t*) {
#else
cudaError_t cudaStreamGetCaptureInfo(cudaStream_t, cudaStreamCaptureStatus* status, unsigned long long* id,
                                     cudaGraph_t* graph, const cudaGraphNode_t**, size_t*) {
#endif
    *status = capture ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
    *id = capture;
    *graph = graph_of(capture);
    return result_of("cudaStreamGetCaptureInfo");
}
cudaError_t cudaUserObjectCreate(cudaUserObject_t* object, void* argument, cudaHostFn_t destroy, unsigned,
                                 unsigned) {
    if (const cudaError_t status = result_of("cudaUserObjectCreate")) return status;
    auto* made = new Object{destroy, argument};
    objects.insert(made);
    *object = reinterpret_cast<cudaUserObject_t>(made);
    return cudaSuccess;
}
cudaError_t cudaUserObjectRelease(cudaUserObject_t object, unsigned) {
    destroy(reinterpret_cast<Object*>(object));
    return cudaSuccess;
}
cudaError_t cudaGraphRetainUserObject(cudaGraph_t graph, cudaUserObject_t object, unsigned, unsigned) {
    if (const cudaError_t status = result_of("cudaGraphRetainUserObject")) return status;
    kept_by_graphs.emplace(graph, reinterpret_cast<Object*>(object));
    return cudaSuccess;
}
// For class Workspace, which is not tested here.
cudaError_t cudaStreamIsCapturing(cudaStream_t, cudaStreamCaptureStatus*) { return cudaErrorUnknown; }
cudaError_t cudaMemPoolCreate(cudaMemPool_t*, const cudaMemPoolProps*) { return cudaErrorUnknown; }
cudaError_t cudaMemPoolSetAttribute(cudaMemPool_t, cudaMemPoolAttr, void*) { return cudaErrorUnknown; }
cudaError_t cudaMallocFromPoolAsync(void**, size_t, cudaMemPool_t, cudaStream_t) { return cudaErrorUnknown; }
cudaError_t cudaFreeAsync(void*, cudaStream_t) { return cudaErrorUnknown; }

}  // extern "C"

namespace octavo::cuda {

void check(cudaError_t status, const char* what) {
    if (status != cudaSuccess) throw DeviceError(what);
}

namespace {

// A workspace, after each of `calls` has failed. `device` tells tests apart: what is kept stays.
PersistentWorkspace workspace_after_failures(int32_t device, size_t bytes,
                                             const std::vector<const char*>& calls) {
    const std::set<void*> before = allocations;
    for (const char* call : calls) {
        failing = call;
        EXPECT_THROW(persistent_workspace(device, nullptr, bytes, 4), DeviceError) << call;
        EXPECT_EQ(allocations, before) << call;
        EXPECT_EQ(num_streams, 0) << call;
        EXPECT_EQ(mode, cudaStreamCaptureModeGlobal) << call;
        EXPECT_EQ(objects.size(), kept_by_graphs.size()) << call;
    }
    const PersistentWorkspace workspace = persistent_workspace(device, nullptr, bytes, 4);
    EXPECT_EQ(allocations.size(), before.size() + 1);
    EXPECT_EQ(allocations.count(workspace.counters), 1u);
    EXPECT_EQ(num_streams, 0);
    return workspace;
}

const std::vector<const char*> kAllocating{"cudaThreadExchangeStreamCaptureMode", "cudaMalloc",
                                           "cudaStreamCreateWithFlags", "cudaMemsetAsync",
                                           "cudaStreamSynchronize"};

TEST(Workspace, KeepsNothingOfCallsThatFail) {
    std::vector<const char*> calls{"cudaStreamGetCaptureInfo", "cudaStreamGetId"};
    calls.insert(calls.end(), kAllocating.begin(), kAllocating.end());
    const PersistentWorkspace workspace = workspace_after_failures(0, 1000, calls);
    EXPECT_EQ(persistent_workspace(0, nullptr, 1000, 4).partial, workspace.partial);
    // A launch under way may still use what is outgrown.
    EXPECT_NE(workspace_after_failures(0, 2000, calls).partial, workspace.partial);
    EXPECT_EQ(allocations.count(workspace.counters), 1u);
}

TEST(Workspace, OfACaptureWhoseCallsFailedIsPassedOn) {
    capture = 1;
    std::vector<const char*> calls{"cudaStreamGetCaptureInfo", "cudaUserObjectCreate",
                                   "cudaGraphRetainUserObject"};
    calls.insert(calls.end(), kAllocating.begin(), kAllocating.end());
    const PersistentWorkspace first = workspace_after_failures(1, 1000, calls);
    const size_t num_allocations = allocations.size();
    end_capture();
    for (unsigned long long other : {2, 3}) {
        capture = other;
        EXPECT_EQ(persistent_workspace(1, nullptr, 500, 4).counters, first.counters);
        end_capture();
    }
    EXPECT_TRUE(objects.empty());
    EXPECT_EQ(allocations.size(), num_allocations);
}

TEST(Workspace, OfCallsThatGrowSlowlyIsSeldomOutgrown) {
    const size_t num_allocations = allocations.size();
    for (size_t size = 1; size <= 4096; ++size) persistent_workspace(2, nullptr, 16 * size, size);
    EXPECT_LE(allocations.size(), num_allocations + 13);
}

PersistentWorkspace workspace_of(int32_t device, uintptr_t stream) {
    return persistent_workspace(device, reinterpret_cast<cudaStream_t>(stream), 100, 4);
}
void use_streams(int32_t device, uintptr_t first, uintptr_t last) {
    for (uintptr_t stream = first; stream <= last; ++stream) workspace_of(device, stream);
}

TEST(Workspace, OfStreamsWithoutEndIsBounded) {
    constexpr int32_t kDevice = 3;
    constexpr uintptr_t kLiving = 10;
    const size_t num_allocations = allocations.size();
    const PersistentWorkspace of_other_device = workspace_of(kDevice + 1, 1);
    const PersistentWorkspace living = workspace_of(kDevice, kLiving), first = workspace_of(kDevice, 100);
    for (uintptr_t stream = 101; stream < 1000; ++stream) {
        EXPECT_NE(workspace_of(kDevice, stream).counters, living.counters);
        EXPECT_LE(allocations.size(), num_allocations + 130);
        if (stream % 30 == 0) {
            EXPECT_EQ(workspace_of(kDevice, kLiving).counters, living.counters);
        }
    }
    EXPECT_EQ(allocations.count(of_other_device.counters), 1u);
    EXPECT_EQ(freed.count(first.counters), 1u);
    EXPECT_EQ(allocations.count(workspace_of(kDevice, 100).counters), 1u) << "it may live on";
}

TEST(Workspace, IsKeptIfFreeingOthersFails) {
    constexpr int32_t kDevice = 5;
    use_streams(kDevice, 1, 128);
    const std::set<void*> before = allocations;
    failing = "cudaThreadExchangeStreamCaptureMode";
    EXPECT_THROW(workspace_of(kDevice, 129), DeviceError);
    EXPECT_EQ(allocations, before);
    workspace_of(kDevice, 129);
    EXPECT_EQ(allocations.size(), before.size() + 1 - 64);
}

TEST(Workspace, ThatAThreadMayStillLaunchWithIsKept) {
    constexpr int32_t kDevice = 6;
    std::promise<PersistentWorkspace> got;
    std::promise<void> may_end;
    std::thread thread([&] {
        workspace_of(kDevice, 1);
        got.set_value(workspace_of(kDevice, 2));
        may_end.get_future().wait();
    });
    const PersistentWorkspace held = got.get_future().get();
    use_streams(kDevice, 100, 1000);
    EXPECT_EQ(allocations.count(held.counters), 1u);
    may_end.set_value();
    thread.join();
    use_streams(kDevice, 1001, 2000);
    EXPECT_EQ(freed.count(held.counters), 1u);
}

TEST(Workspace, OfACaptureIsKept) {
    constexpr int32_t kDevice = 7;
    capture = 4;
    const PersistentWorkspace captured = workspace_of(kDevice, 1);
    capture = 0;
    use_streams(kDevice, 1, 1000);
    EXPECT_EQ(allocations.count(captured.counters), 1u);
    capture = 4;
    EXPECT_EQ(workspace_of(kDevice, 1).counters, captured.counters);
    end_capture();
}

// All threads have the same handle for a stream of their own.
TEST(Workspace, OfThreadsThatJoinACaptureIsNotShared) {
    const auto workspace = [] { return persistent_workspace(8, cudaStreamPerThread, 100, 4).counters; };
    capture = 5;
    const uint32_t* const own = workspace();
    const uint32_t* others[2];
    for (const uint32_t*& other : others) std::thread([&] { other = workspace(); }).join();
    EXPECT_NE(others[0], own);
    EXPECT_NE(others[1], own);
    EXPECT_NE(others[0], others[1]) << "a thread that follows one is another";
    EXPECT_EQ(workspace(), own);
    end_capture();
    EXPECT_TRUE(objects.empty());
}

}  // namespace
}  // namespace octavo::cuda
