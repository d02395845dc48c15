// Brings rows of queries and of a paged cache from global to shared memory, for the kernel of
// latent_attention.
#pragma once

#include "cuda/latent/parameters.h"
#include "cuda/latent/plan.h"
#include "cuda/ptx/cp_async.h"

#include <cstdint>

namespace octavo::cuda {

// Copies 16 bytes by this thread's current cp.async group, or at once where rows are not `aligned`; writes
// zeros if not `valid`, when `from` may be any mapped address.
template <class Stored>
__device__ __forceinline__ void copy_chunk(char* to, const Stored* from, bool valid, bool aligned) {
    if (aligned) return ptx::cp_async_16(ptx::shared_address(to), from, valid);
    auto* const elements = reinterpret_cast<Stored*>(to);
#pragma unroll
    for (int i = 0; i < 16 / static_cast<int>(sizeof(Stored)); ++i) elements[i] = valid ? from[i] : Stored{};
}

// How a warp copies its share of a tile of kKeys keys: kKeys / 8 keys, in chunks of 16 bytes. Page numbers
// are read one tile ahead, since the copy waits for them.
template <class Stored, int kKeys>
class KeyCopy {
  public:
    static constexpr int kRowBytes = kLatentQkDim * static_cast<int>(sizeof(Stored));
    static constexpr int kRowStride = kRowBytes + kLatentPadBytes;
    static constexpr int kTileBytes = kKeys * kRowStride;

    // Copies keys [0, end_key) of sequence b from key `begin` on, where the first tile begins. Keys from
    // end_key on become zeros.
    __device__ KeyCopy(const LatentAttentionParams& p, const LatentLaunch& launch, int32_t b, int32_t begin,
                       int32_t end_key)
        : p_(p),
          launch_(launch),
          pages_(p.page_table.from(b * p.page_table_stride)),
          end_key_(end_key),
          key_(begin + threadIdx.x / 32 * kWarpKeys + threadIdx.x % 32 % kWarpKeys) {
        find_page();
    }

    // Copies the next tile.
    __device__ void run(char* tile) {
        const int lane = threadIdx.x % 32;
        const bool valid = key_ < end_key_;
        const int64_t row =
            valid ? page_ * p_.kv_page_stride + launch_.page_size.remainder(key_) * p_.kv_slot_stride : 0;
        key_ += kKeys;
        find_page();
        char* const to = tile + threadIdx.x / 32 * kWarpKeys * kRowStride;
        const auto* const kv = static_cast<const Stored*>(p_.kv);
#pragma unroll
        for (int i = 0; i < (kWarpChunks + 31) / 32; ++i) {
            const int index = lane + 32 * i, key = index / kRowChunks, chunk = index % kRowChunks;
            const int64_t from = __shfl_sync(~0u, row, key);
            const bool is_key = __shfl_sync(~0u, valid, key);
            if (kWarpChunks % 32 != 0 && index >= kWarpChunks) break;  // the last turn; no shuffle follows
            copy_chunk(to + key * kRowStride + 16 * chunk, kv + from + chunk * (16 / sizeof(Stored)), is_key,
                       launch_.kv_aligned);
        }
    }

  private:
    static constexpr int kWarpKeys = kKeys / (kLatentThreads / 32);
    static constexpr int kRowChunks = kRowBytes / 16, kWarpChunks = kWarpKeys * kRowChunks;

    // Starts loading the page of this lane's key. Entries past the sequence's last page are never read.
    __device__ void find_page() {
        if (key_ < end_key_) page_ = pages_[launch_.page_size.quotient(key_)];
    }

    const LatentAttentionParams& p_;
    const LatentLaunch& launch_;
    const IndexArray pages_;
    const int32_t end_key_;
    int32_t key_;  // this lane's key in the next tile
    int64_t page_ = 0;
};

// Copies a CTA's rows from `first_row` of the sequence on, and zeros behind the last one.
template <class T>
__device__ __forceinline__ void copy_queries(const LatentAttentionParams& p, const LatentLaunch& launch,
                                             const LatentSequence& sequence, int32_t first_row,
                                             int32_t num_rows, char* to) {
    using Copy = KeyCopy<T, 64>;  // rows of queries have the layout of keys
    constexpr int kRowChunks = Copy::kRowBytes / 16;
    for (int i = threadIdx.x; i < kLatentRows * kRowChunks; i += kLatentThreads) {
        const int r = i / kRowChunks, chunk = i % kRowChunks;
        const bool valid = first_row + r < num_rows;
        const int32_t row = valid ? first_row + r : first_row;
        const int32_t query = launch.num_q_heads.quotient(row), head = launch.num_q_heads.remainder(row);
        const T* const from = static_cast<const T*>(p.q) + (sequence.first_q + query) * p.q_token_stride +
                              head * p.q_head_stride;
        copy_chunk(to + r * Copy::kRowStride + 16 * chunk, from + 8 * chunk, valid, launch.q_aligned);
    }
}

}  // namespace octavo::cuda
