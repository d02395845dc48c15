// Tiles of K and V that are gathered key by key, where pages are too small for the copy engine. One warp
// copies a tile with cp.async, 16 bytes a lane, to where the copy engine would have put them; consumers
// execute the fence that wgmma needs. Page: docs/kernels/sm90_attention.md.
#pragma once

#include "common/fast_divide.h"
#include "cuda/ptx/mbarrier.h"
#include "cuda/sm90_attention/shared.cuh"

namespace octavo::cuda {

// Gathers tiles of K, or of V, of one row tile: what KeyLoader is to the copy engine.
template <class Config, int kBlocks>
class KeyGatherer {
  public:
    // Where the rows of a tile lie, counted in 16 bytes, those of 32 keys in a part.
    static constexpr int kParts = (Config::kKeys + 31) / 32;
    struct Places {
        uint32_t of[kParts];
    };
    struct Pages {
        int32_t of[kParts];  // -1: no query sees the key
    };

    __device__ static KeyGatherer keys(const AttentionParams& p, const Sm90Launch& plan,
                                       const Sm90Work& work) {
        return {p, plan, work, p.k, p.k_outer_stride, p.k_token_stride, p.k_head_stride, p.head_dim};
    }
    __device__ static KeyGatherer values(const AttentionParams& p, const Sm90Launch& plan,
                                         const Sm90Work& work) {
        return {p, plan, work, p.v, p.v_outer_stride, p.v_token_stride, p.v_head_stride, p.head_dim_v};
    }

    __device__ KeyGatherer(const AttentionParams& p, const Sm90Launch& plan, const Sm90Work& work,
                           const void* rows, int64_t page_stride, int64_t token_stride, int64_t head_stride,
                           int32_t head_dim)
        : page_size_(plan.page_size),
          page_ids_(p.page_table.from(work.batch * p.page_table_stride)),
          rows_(static_cast<const unsigned char*>(rows) +
                2 * (work.first_head / p.group_size()) * head_stride),
          page_stride_(static_cast<uint32_t>(page_stride / 8)),
          token_stride_(static_cast<uint32_t>(token_stride / 8)),
          row_bytes_(2 * head_dim),
          end_(work.seqlen_k),
          hole_begin_(work.prefix_len),
          hole_end_(work.visibility<Config>(p, 0, 1).window_begin(work.q_pos(0))) {}

    // Starts to load the numbers of the pages that this lane's keys are in.
    __device__ Pages load_pages(int32_t first_key) const {
        Pages pages;
#pragma unroll
        for (int part = 0; part < kParts; ++part) {
            const int32_t key = first_key + 32 * part + threadIdx.x % 32;
            const bool is_hole = key >= hole_begin_ && key < hole_end_;
            pages.of[part] = key < end_ && !is_hole ? page_ids_[page_size_.quotient(key)] : -1;
        }
        return pages;
    }
    __device__ Places find(int32_t first_key, const Pages& pages) const {
        Places places;
#pragma unroll
        for (int part = 0; part < kParts; ++part) {
            const int32_t page = pages.of[part];
            const int32_t slot = page_size_.remainder(first_key + 32 * part + threadIdx.x % 32);
            places.of[part] = page < 0 ? kNowhere : page * page_stride_ + slot * token_stride_;
        }
        return places;
    }

    // Starts to copy a tile, swizzled as the copy engine does it; each lane arrives at `full` once its copies
    // are complete. Columns that the cache lacks, and keys that no query sees, become zeros.
    __device__ __forceinline__ void gather(unsigned char* tile, uint64_t* full, const Places& places) const {
        bool is_whole = row_bytes_ == kBlocks * Config::kRowBytes;
#pragma unroll
        for (int part = 0; part < kParts; ++part)
            is_whole &= places.of[part] != kNowhere || threadIdx.x % 32 >= rows_of(part);
        if (__all_sync(~0u, is_whole))
            gather<true>(tile, places);
        else
            gather<false>(tile, places);
        ptx::cp_async_mbarrier_arrive(full);
    }

  private:
    static constexpr uint32_t kNowhere = ~0u;

    __device__ static constexpr int rows_of(int part) { return min(Config::kKeys - 32 * part, 32); }

    // kWhole: all of the tile is copied. A warp that copies alone is held up by what its copies wait for, so
    // that these come one behind the other, without anything to decide between them.
    template <bool kWhole>
    __device__ __forceinline__ void gather(unsigned char* tile, const Places& places) const {
        // Eight lanes take the 128 bytes that a row has in a block, so that a warp takes four rows at a time.
        const int lane = threadIdx.x % 32, column = lane % 8 * 16;
        const unsigned char* const from = rows_ + column;
        const uint32_t to =
            ptx::shared_address(tile) + lane / 8 * Config::kRowBytes + (column ^ lane / 8 * 16);
#pragma unroll
        for (int part = 0; part < kParts; ++part) {
            static_assert(Config::kKeys % 8 == 0);
#pragma unroll kWhole ? 8 : 1
            for (int row = 0; row < rows_of(part); row += 4) {
                const uint32_t place = __shfl_sync(~0u, places.of[part], row + lane / 8);
                const bool is_seen = kWhole || place != kNowhere;
                const unsigned char* const row_from = from + (is_seen ? static_cast<size_t>(place) * 16 : 0);
                const uint32_t row_to = (to ^ row % 8 * 16) + (32 * part + row) * Config::kRowBytes;
#pragma unroll
                for (int block = 0; block < kBlocks; ++block) {
                    const int offset = block * Config::kRowBytes;
                    // Of a row shorter than a block, this lane's column may lie behind the array.
                    const bool is_copied = kWhole || (is_seen && offset + column < row_bytes_);
                    ptx::cp_async_16(row_to + block * Config::kKeyBlockBytes,
                                     row_from + (is_copied ? offset : -column), is_copied);
                }
            }
        }
    }

    const FastDivide& page_size_;
    const IndexArray page_ids_;
    const unsigned char* rows_;  // of this KV head
    uint32_t page_stride_, token_stride_;
    int32_t row_bytes_;
    int32_t end_, hole_begin_, hole_end_;
};

}  // namespace octavo::cuda
