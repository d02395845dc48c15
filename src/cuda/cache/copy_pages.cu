// Copies whole pages inside a cache, or between two, one of which may be in pinned host memory.
//
// grid: one warp per (copy, slot, KV head), which copies K, V and their scales. It lets no kernel start
// before it has ended. Even so CUDA promises that its writes are seen behind griddepcontrol.wait alone:
// for what reads pages before that (static_past), a copy is work under way.
#include "common/print_kernels.h"
#include "cuda/backend.h"
#include "cuda/cache/plan.h"
#include "cuda/launch.cuh"
#include "cuda/rows.cuh"

namespace octavo::cuda {
namespace {

using Pages = CopyPagesParams::Pages;

template <class T>
__global__ void copy_pages_kernel(const __grid_constant__ CopyPagesParams p, bool k_aligned, bool v_aligned) {
    const int64_t row = warp_row();
    const int64_t head = row % p.num_kv_heads;
    const int64_t slot = row / p.num_kv_heads % p.page_size;
    const int64_t copy = row / p.num_kv_heads / p.page_size;
    if (copy >= p.num_copies) return;
    const IndexArray pages = p.copies.from(copy * p.copies_stride);
    auto at = [slot, head](const Pages& cache, int64_t page) {
        return static_cast<T*>(cache.data) + page * cache.page_stride + slot * cache.slot_stride +
               head * cache.head_stride;
    };
    constexpr auto kSize = static_cast<int32_t>(sizeof(T));
    copy_row(at(p.to_k, pages[1]), at(p.from_k, pages[0]), p.k_row_bytes / kSize, k_aligned);
    copy_row(at(p.to_v, pages[1]), at(p.from_v, pages[0]), p.v_row_bytes / kSize, v_aligned);
    if (threadIdx.x % 32 != 0) return;
    auto copy_scale = [pages, slot, head](const CacheScales& to, const CacheScales& from) {
        if (from.data != nullptr) to.word(pages[1], slot, head) = from.word(pages[0], slot, head);
    };
    copy_scale(p.to_k_scales, p.from_k_scales);
    copy_scale(p.to_v_scales, p.from_v_scales);
}

}  // namespace

void copy_pages(const CopyPagesParams& p, void* stream) {
    const CopyPagesPlan plan = plan_copy_pages(p);
    if (plan.num_rows == 0) return;
    if (prints_kernels()) print_kernel(describe(plan));
    const DeviceGuard guard(p.device.index);
    const LaunchShape shape{dim3(blocks_for_rows(plan.num_rows)), 32 * kRowsPerBlock};
    auto run = [&](auto number) {
        launch<copy_pages_kernel<decltype(number)>>("copy_pages", p.device.index,
                                                    static_cast<cudaStream_t>(stream), shape, p,
                                                    plan.k_aligned, plan.v_aligned);
    };
    switch (size_of(p.dtype)) {
        case 1: return run(uint8_t{});
        case 2: return run(uint16_t{});
        default: return run(uint32_t{});
    }
}

}  // namespace octavo::cuda
