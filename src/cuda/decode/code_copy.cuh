// Copies codes and their scales from global to shared memory. Page: docs/kernels/quantised_decode.md.
#pragma once

#include "cuda/decode/copy.cuh"
#include "cuda/decode/scales.cuh"

#include <type_traits>

namespace octavo::cuda {

// Copies rows of codes, whole rows at a time; where rows follow each other, kStepKeys rows from one address.
template <class T, class Config>
class CodeCopier : public QueryRowCopier<T, Config> {
    using Base = QueryRowCopier<T, Config>;
    using Base::chunk_at, Base::p_;

  public:
    // Where this lane's key of a block lies.
    struct Place {
        uint32_t page;
        int32_t slot, kv_head;
        bool is_whole;  // whether all keys of the block are there, one right behind the other
    };

    __device__ CodeCopier(const AttentionParams& p, const CodeLayout& layout)
        : Base(p), layout_(layout), scale_place_(ScalePlaces::place(threadIdx.x % 32)) {
        const int k_column = k_.column, v_column = v_.column;
        // Copies of columns from head_dim on, of values from head_dim_v on, write zeros; their address only
        // has to be mapped.
        k_.has_column = 128 * k_column < p.head_dim * Config::kKeyBits;
        v_.has_column = 128 * v_column < p.head_dim_v * Config::kValueBits;
        k_.chunks = static_cast<const uint4*>(p.k) + (k_.has_column ? k_column : 0);
        v_.chunks = static_cast<const uint4*>(p.v) + (v_.has_column ? v_column : 0);
        pin_in_register(k_.chunks);
        pin_in_register(v_.chunks);
        pin_in_register(scale_place_);
    }

    // Returns the head of the pages, since keys, values and scales each have a stride of their own for it.
    __device__ uint32_t head_offset(int32_t kv_head) const {
        return Config::kHeadDim > kHeadDimWithoutParts ? layout_.group_parts.quotient(kv_head) : kv_head;
    }
    __device__ Place place(uint32_t page_id, int32_t slot, uint32_t head_offset, bool is_whole) const {
        return {page_id, slot, static_cast<int32_t>(head_offset), is_whole};
    }

    // Starts the copies of a block. All places are multiples of 512 bytes; that of scales is one of 256.
    __device__ void copy(KeyRows<Config> k, ValueRows<Config> v, uint32_t scales, const Place& from) const {
        copy_keys(k, scales, from);
        copy_values(v, from);
    }
    // Start the copies of keys alone, with the scales of keys and values, and of values alone.
    __device__ void copy_keys(KeyRows<Config> k, uint32_t scales, const Place& from) const {
        copy_rows(k, k_, offset(layout_.k, from), layout_.k_in_order && from.is_whole);
        copy_scales(scales, from);
    }
    __device__ void copy_values(ValueRows<Config> v, const Place& from) const {
        copy_rows(v, v_, offset(layout_.v, from), layout_.v_in_order && from.is_whole);
    }

  private:
    // What this lane copies of rows of kChunks chunks.
    template <int kChunks>
    struct Lane {
        static constexpr int kRowsPerCopy = 32 / kChunks;
        int column = threadIdx.x % kChunks, row = threadIdx.x % 32 / kChunks;
        uint32_t place = Rows<kChunks>::offset(row, column);
        const uint4* chunks = nullptr;  // this lane's chunk of the cache's first row
        bool has_column = true;

        __device__ Lane() {
            pin_in_register(row);
            pin_in_register(place);
        }
    };

    __device__ static uint32_t offset(const CodeLayout::Strides& strides, const Place& from) {
        return from.page * strides.page + static_cast<uint32_t>(from.slot) * strides.token +
               static_cast<uint32_t>(from.kv_head) * strides.head;
    }

    template <int kChunks>
    __device__ void copy_rows(Rows<kChunks> to, const Lane<kChunks>& lane, uint32_t offset,
                              bool in_order) const {
        constexpr int kRowsPerCopy = Lane<kChunks>::kRowsPerCopy;
        const uint32_t place = to.address ^ lane.place;  // not a sum: RowCopier says why
        if (in_order) {
#pragma unroll
            for (int step = 0; step < Config::kBlockKeys; step += kStepKeys) {
                const uint32_t first = __shfl_sync(~0u, offset, step);
                const auto* const from =
                    static_cast<const uint4*>(chunk_at(lane.chunks, first + lane.row * kChunks));
#pragma unroll
                for (int row = 0; row < kStepKeys; row += kRowsPerCopy) {
                    ptx::cp_async_16_evict_first(Rows<kChunks>::advance_rows(place, step + row),
                                                 from + row * kChunks, true);
                }
            }
        } else {
#pragma unroll
            for (int row = 0; row < Config::kBlockKeys; row += kRowsPerCopy) {
                const uint32_t own = __shfl_sync(~0u, offset, lane.row + row);
                ptx::cp_async_16_evict_first(Rows<kChunks>::advance_rows(place, row),
                                             chunk_at(lane.chunks, own), lane.has_column);
            }
        }
    }

    __device__ void copy_scales(uint32_t to, const Place& from) const {
        if (!has_scales<Config>(layout_)) return;
        const uint32_t place = to ^ scale_place_;
        copy_scale(place, layout_.k_scales, from);
        copy_scale(place + ScalePlaces::kOfValue, layout_.v_scales, from);
    }
    __device__ static void copy_scale(uint32_t to, const CodeLayout::Scales& scales, const Place& from) {
        const void* address;  // computed in one instruction, as in chunk_at
        asm("mad.wide.u32 %0, %1, 4, %2;"
            : "=l"(address)
            : "r"(offset(scales.strides, from)), "l"(scales.data));
        ptx::cp_async_4(to, address);
    }

    const CodeLayout& layout_;
    Lane<Config::kKeyChunks> k_;
    Lane<Config::kValueChunks> v_;
    uint32_t scale_place_;
};

template <class T, class Config>
using BlockCopier = std::conditional_t<Config::kHasCodes, CodeCopier<T, Config>, RowCopier<T, Config>>;

}  // namespace octavo::cuda
