// Copies whole pages inside the cache.
// grid: one warp a (copy, slot, KV head), K and V together.
#include "cuda/alignment.h"
#include "cuda/backend.h"
#include "cuda/rows.cuh"
#include "cuda/runtime.h"

namespace octavo::cuda {
namespace {

template <class T>
__global__ void copy_pages_kernel(const __grid_constant__ CopyPagesParams p, bool k_aligned, bool v_aligned) {
    const int64_t row = warp_row();
    const int64_t head = row % p.num_kv_heads;
    const int64_t slot = row / p.num_kv_heads % p.page_size;
    const int64_t copy = row / p.num_kv_heads / p.page_size;
    if (copy >= p.num_copies) return;
    const int32_t* const pages = p.copies + copy * p.copies_stride;
    const int64_t from = pages[0], to = pages[1];
    T* const k = static_cast<T*>(p.k_pages) + slot * p.k_slot_stride + head * p.k_head_stride;
    T* const v = static_cast<T*>(p.v_pages) + slot * p.v_slot_stride + head * p.v_head_stride;
    copy_row(k + to * p.k_page_stride, k + from * p.k_page_stride, p.head_dim, k_aligned);
    copy_row(v + to * p.v_page_stride, v + from * p.v_page_stride, p.head_dim, v_aligned);
}

}  // namespace

void copy_pages(const CopyPagesParams& p, void* stream) {
    const int64_t rows = p.num_copies * p.page_size * p.num_kv_heads;
    if (rows == 0) return;
    const DeviceGuard guard(p.device.index);
    const bool whole = p.head_dim * size_of(p.dtype) % 16 == 0;
    const bool k_aligned =
        whole && aligned(p.k_pages, 16, {p.k_page_stride, p.k_slot_stride, p.k_head_stride}, p.dtype);
    const bool v_aligned =
        whole && aligned(p.v_pages, 16, {p.v_page_stride, p.v_slot_stride, p.v_head_stride}, p.dtype);
    with_type(p.dtype, [&](auto type) {
        copy_pages_kernel<decltype(type)>
            <<<blocks_for_rows(rows), 32 * kRowsPerBlock, 0, static_cast<cudaStream_t>(stream)>>>(
                p, k_aligned, v_aligned);
    });
    check(cudaGetLastError(), "copy_pages");
}

}  // namespace octavo::cuda
