// Copies keys and values of 16 bits from global to shared memory.
#pragma once

#include "cuda/decode/parameters.h"
#include "cuda/decode/query_copy.cuh"
#include "cuda/ptx/l2_policy.h"

namespace octavo::cuda {

// Copies rows of keys and values, whole rows at a time: with requests of 64 bytes, an H100 reads 2.3 TB/s
// instead of 2.9.
template <class T, class Config>
class RowCopier : public QueryRowCopier<T, Config> {
    using Base = QueryRowCopier<T, Config>;
    using Base::chunk_at, Base::column_, Base::kChunks, Base::kLanesPerRow, Base::kPerChunk,
        Base::kRowsPerCopy, Base::lane_row_, Base::p_, Base::place_;

  public:
    // The offset of this lane's row of a block from the cache's start, in units of 16 bytes. The lower 16
    // lanes have rows of K, the upper ones rows of V.
    using Place = uint32_t;

    __device__ RowCopier(const AttentionParams& p, const CodeLayout&) : Base(p) {
        const int lane = threadIdx.x % 32;
        // Copies of columns from head_dim on, of values from head_dim_v on, write zeros; their address only
        // has to be mapped.
        k_ = static_cast<const uint4*>(p.k) + (8 * column_ < p.head_dim ? column_ : 0);
        v_ = static_cast<const uint4*>(p.v) + (8 * column_ < p.head_dim_v ? column_ : 0);
        page_stride_ = static_cast<uint32_t>((lane < 16 ? p.k_outer_stride : p.v_outer_stride) / kPerChunk);
        token_stride_ = static_cast<uint32_t>((lane < 16 ? p.k_token_stride : p.v_token_stride) / kPerChunk);
        head_stride_ = static_cast<uint32_t>((lane < 16 ? p.k_head_stride : p.v_head_stride) / kPerChunk);
        pin_in_register(k_);
        pin_in_register(v_);
        pin_in_register(page_stride_);
        pin_in_register(token_stride_);
    }

    __device__ uint32_t head_offset(int32_t kv_head) const {
        return static_cast<uint32_t>(kv_head) * head_stride_;
    }
    __device__ Place place(uint32_t page_id, int32_t slot, uint32_t head_offset, bool) const {
        return page_id * page_stride_ + static_cast<uint32_t>(slot) * token_stride_ + head_offset;
    }

    // Starts the copies of a block.
    __device__ void copy(KeyRows<Config> k, ValueRows<Config> v, uint32_t, Place offset) const {
#pragma unroll
        for (int row = 0; row < Config::kBlockKeys; row += kRowsPerCopy) {
            copy_rows<Of::keys>(k.address + place_, row, __shfl_sync(~0u, offset, lane_row_ + row));
            copy_rows<Of::values>(v.address + place_, row, __shfl_sync(~0u, offset, lane_row_ + 16 + row));
        }
    }
    // Start the copies of keys or of values alone, to a multiple of 512 bytes.
    __device__ void copy_keys(KeyRows<Config> k, uint32_t, Place offset) const {
        copy_half<Of::keys>(k, offset);
    }
    __device__ void copy_values(ValueRows<Config> v, Place offset) const { copy_half<Of::values>(v, offset); }

  private:
    enum class Of { keys, values };

    template <Of kOf>
    __device__ void copy_half(KeyRows<Config> to, uint32_t offset) const {
        // This is an exclusive or instead of a sum: ptxas 13.0 would leave the uniform part of a sum to the
        // copy instruction, which it encodes as an illegal instruction where there is a cache policy.
        const uint32_t place = to.address ^ place_;
        static_assert(16 * kLanesPerRow * kRowsPerCopy <= 512);
        constexpr int kFirstLane = kOf == Of::keys ? 0 : 16;
#pragma unroll
        for (int row = 0; row < Config::kBlockKeys; row += kRowsPerCopy) {
            copy_rows<kOf>(place, row, __shfl_sync(~0u, offset, lane_row_ + kFirstLane + row));
        }
    }

    // Copies one row or several, from `row` on: this lane copies its chunk of its row, from `offset`.
    template <Of kOf>
    __device__ void copy_rows(uint32_t place, int row, uint32_t offset) const {
        const uint4* const chunks = kOf == Of::keys ? k_ : v_;
        const int32_t head_dim = kOf == Of::keys ? p_.head_dim : p_.head_dim_v;
        if (kChunks > 1 || column_ < Config::kHeadDim / 8) {
            const uint32_t to = KeyRows<Config>::advance_rows(place, row);
            ptx::cp_async_16_evict_first(to, chunk_at(chunks, offset), 8 * column_ < head_dim);
#pragma unroll
            for (int chunk = kLanesPerRow; chunk < kChunks * kLanesPerRow; chunk += kLanesPerRow) {
                const bool exists = 8 * (column_ + chunk) < head_dim;
                ptx::cp_async_16_evict_first(to + 16 * chunk, chunk_at(chunks + (exists ? chunk : 0), offset),
                                             exists);
            }
        }
    }

    const uint4 *k_, *v_;                                // this lane's chunk of the cache's first row
    uint32_t page_stride_, token_stride_, head_stride_;  // in 16 bytes; of K in the lower lanes, of V above
};

}  // namespace octavo::cuda
