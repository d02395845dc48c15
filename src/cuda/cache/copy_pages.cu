// Copies whole pages inside a cache, or between two, one of which may be in pinned host memory.
// grid: one warp a (copy, slot, KV head), K and V together.
#include "cuda/alignment.h"
#include "cuda/backend.h"
#include "cuda/rows.cuh"
#include "cuda/runtime.h"

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
    const int32_t* const pages = p.copies + copy * p.copies_stride;
    auto at = [slot, head](const Pages& cache, int64_t page) {
        return static_cast<T*>(cache.data) + page * cache.page_stride + slot * cache.slot_stride +
               head * cache.head_stride;
    };
    copy_row(at(p.to_k, pages[1]), at(p.from_k, pages[0]), p.head_dim, k_aligned);
    copy_row(at(p.to_v, pages[1]), at(p.from_v, pages[0]), p.head_dim, v_aligned);
}

}  // namespace

void copy_pages(const CopyPagesParams& p, void* stream) {
    const int64_t rows = p.num_copies * p.page_size * p.num_kv_heads;
    if (rows == 0) return;
    const DeviceGuard guard(p.device.index);
    auto rows_aligned = [&p](const Pages& pages) {
        return aligned(pages.data, 16, {p.head_dim, pages.page_stride, pages.slot_stride, pages.head_stride},
                       p.dtype);
    };
    const bool k_aligned = rows_aligned(p.from_k) && rows_aligned(p.to_k);
    const bool v_aligned = rows_aligned(p.from_v) && rows_aligned(p.to_v);
    with_type(p.dtype, [&](auto type) {
        copy_pages_kernel<decltype(type)>
            <<<blocks_for_rows(rows), 32 * kRowsPerBlock, 0, static_cast<cudaStream_t>(stream)>>>(
                p, k_aligned, v_aligned);
    });
    check(cudaGetLastError(), "copy_pages");
}

}  // namespace octavo::cuda
