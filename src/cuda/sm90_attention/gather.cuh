// Tiles of K and V that are gathered key by key, where pages are too small for the copy engine. The
// producer's four warps, each on a quarter of the SM, share every tile: they copy 16 bytes a lane with
// cp.async to where the copy engine would have put them; consumers execute the fence that wgmma needs. Page:
// docs/kernels/sm90_attention.md.
#pragma once

#include "common/fast_divide.h"
#include "cuda/ptx/mbarrier.h"
#include "cuda/sm90_attention/shared.cuh"
#include "cuda/warp.cuh"

namespace octavo::cuda {

// Gathers one warp's rows of the tiles of one row tile: what KeyLoader is to the copy engine.
template <class Config>
class KeyGatherer {
  public:
    static constexpr int kRows = Config::kKeys / 4;  // one page to look up a lane
    static_assert(kRows % 4 == 0 && kRows <= 32);

    // Where the key of this lane's row is.
    struct Place {
        int32_t page;  // -1: no query sees the key
        int32_t slot;  // in the page
    };

    // `warp`: which quarter of a tile's rows.
    __device__ KeyGatherer(const AttentionParams& p, const Sm90Launch& plan, const Sm90Work& work, int warp)
        : p_(p),
          page_size_(plan.page_size),
          batch_(work.batch),
          kv_head_(work.first_head / p.group_size()),
          first_row_(warp * kRows),
          end_(work.seqlen_k),
          hole_begin_(work.prefix_len),
          hole_end_(work.visibility<Config>(p, 0, 1).window_begin(work.q_pos(0))) {}

    // Starts to load the number of the page, for a tile of K and the tile of V alike.
    __device__ Place find(int32_t first_key) const {
        const int32_t key = first_key + first_row_ + static_cast<int32_t>(threadIdx.x % 32);
        const int32_t index = page_size_.quotient(key);
        const bool is_hole = key >= hole_begin_ && key < hole_end_;
        return {key < end_ && !is_hole ? p_.page_table[batch_ * p_.page_table_stride + index] : -1,
                key - index * static_cast<int32_t>(page_size_.divisor)};
    }

    // Starts to copy the rows, swizzled as the copy engine does it; each lane arrives at `full` once its
    // copies are complete. Columns that the cache lacks, and keys that no query sees, become zeros.
    __device__ __forceinline__ void gather_keys(unsigned char* tile, uint64_t* full,
                                                const Place& place) const {
        gather<Config::kColumnBlocks>(tile, full, place, p_.k, p_.k_outer_stride, p_.k_token_stride,
                                      p_.k_head_stride, p_.head_dim);
    }
    __device__ __forceinline__ void gather_values(unsigned char* tile, uint64_t* full,
                                                  const Place& place) const {
        gather<Config::kValueBlocks>(tile, full, place, p_.v, p_.v_outer_stride, p_.v_token_stride,
                                     p_.v_head_stride, p_.head_dim_v);
    }

  private:
    static constexpr uint32_t kNowhere = ~0u;

    // Eight lanes take the 128 bytes that a row has in a block, so that a warp takes four rows at a time.
    __device__ static int lane() { return threadIdx.x % 32; }
    __device__ static int column() { return lane() % 8 * 16; }

    template <int kBlocks>
    __device__ __forceinline__ void gather(unsigned char* tile, uint64_t* full, const Place& place,
                                           const void* array, int64_t page_stride, int64_t token_stride,
                                           int64_t head_stride, int32_t head_dim) const {
        // Found anew for every tile, and once: registers are scarce where a warp hands out work, too.
        int32_t head = kv_head_;
        pin_in_register(head);
        const unsigned char* from =
            static_cast<const unsigned char*>(array) + 2 * head * head_stride + column();
        pin_in_register(from);
        // Counted in 16 bytes.
        const uint32_t at =
            place.page < 0
                ? kNowhere
                : static_cast<uint32_t>((place.page * page_stride + place.slot * token_stride) >> 3);
        const int32_t row_bytes = 2 * head_dim;
        const bool is_whole = row_bytes == kBlocks * Config::kRowBytes && (at != kNowhere || lane() >= kRows);
        if (__all_sync(~0u, is_whole))
            copy<kBlocks, true>(tile, from, at, row_bytes);
        else
            copy<kBlocks, false>(tile, from, at, row_bytes);
        ptx::cp_async_mbarrier_arrive(full);
    }

    // kWhole: all of the rows is copied. A warp is held up by what its copies wait for, so that these come
    // one behind the other, without anything to decide between them.
    template <int kBlocks, bool kWhole>
    __device__ __forceinline__ void copy(unsigned char* tile, const unsigned char* from, uint32_t at,
                                         int32_t row_bytes) const {
        const int own_row = first_row_ + lane() / 8;
        const uint32_t to =
            ptx::shared_address(tile) + own_row * Config::kRowBytes + (column() ^ own_row % 8 * 16);
#pragma unroll kWhole ? 8 : 1
        for (int row = 0; row < kRows; row += 4) {
            const uint32_t row_at = __shfl_sync(~0u, at, row + lane() / 8);
            const bool is_seen = kWhole || row_at != kNowhere;
            const unsigned char* const row_from = from + (is_seen ? static_cast<size_t>(row_at) * 16 : 0);
            const uint32_t row_to = (to ^ row % 8 * 16) + row * Config::kRowBytes;
#pragma unroll
            for (int block = 0; block < kBlocks; ++block) {
                const int offset = block * Config::kRowBytes;
                const bool is_copied = kWhole || (is_seen && offset + column() < row_bytes);
                ptx::cp_async_16(row_to + block * Config::kKeyBlockBytes, row_from + (is_copied ? offset : 0),
                                 is_copied);
            }
        }
    }

    const AttentionParams& p_;
    const FastDivide& page_size_;
    const int32_t batch_, kv_head_;
    const int32_t first_row_;
    const int32_t end_, hole_begin_, hole_end_;
};

}  // namespace octavo::cuda
