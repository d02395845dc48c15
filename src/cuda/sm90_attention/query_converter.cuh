// The conversion of queries for products with codes. The products are in float16, in which codes are exact.
// Queries of bfloat16 fit into it once the 64 rows of a warpgroup are multiplied by a power of two. (A row
// whose elements are 2^39 times smaller than the warpgroup's largest becomes zeros.)
#pragma once

#include "common/codes.h"
#include "common/float_bits.h"
#include "cuda/ptx/tma.h"
#include "cuda/sm90_attention/shared.cuh"
#include "cuda/tile/code_numbers.cuh"

namespace octavo::cuda {

// One warp converts the queries of one warpgroup in their slots, and leaves the factors that scores and
// results have yet to be multiplied by in QueryScales.
template <class Config>
class QueryConverter {
  public:
    __device__ QueryConverter(const AttentionParams& p, const Sm90Launch& plan, Sm90Shared<Config>& shared,
                              int group)
        : p_(p), plan_(plan), shared_(shared), group_(group) {}

    __device__ void run() {
        Ring<Config::kQSlots> ring;
        Ring<kSm90WorkSlots> work_ring;
        while (true) {
            const Sm90Work work = take_work<Config>(shared_, work_ring);
            if (work.batch < 0) return;
            ptx::mbarrier_wait(&shared_.query_scales.loaded[ring.slot][group_], ring.parity);
            const int32_t kv_head = work.first_head / p_.group_size();
            float2 scales = {scale_of(p_.k_scales, p_.k_dtype, kv_head),
                             scale_of(p_.v_scales, p_.v_dtype, kv_head)};
            const int32_t tokens = work.seqlen_q - work.first_token - group_ * plan_.tokens;
            const int32_t rows = plan_.heads * min(tokens, plan_.tokens);
            if (p_.dtype == DType::bfloat16 && rows > 0)
                scales.x *= to_float16(shared_.q[ring.slot][group_], rows);
            if (threadIdx.x % 32 == 0) {
                shared_.query_scales.scales[ring.slot][group_] = scales;
                ptx::mbarrier_arrive(&shared_.q_full[ring.slot][group_]);
            }
            ring.advance();
        }
    }

  private:
    // The factor that products with the numbers of codes have yet to be multiplied by.
    __device__ static float scale_of(const CacheScales& scales, DType codes, int32_t kv_head) {
        if (Config::kTokenScales) return unlift(codes);
        return scales.data ? float_of_bits(scales.word(0, 0, kv_head)) : 1.0f;
    }
    // Converts rows of bfloat16 in place, and returns the inverse of the power of two.
    __device__ static float to_float16(unsigned char* tile, int32_t num_rows) {
        uint32_t largest = 0;  // the largest finite magnitude, as bits of float32
        for_each_chunk(tile, num_rows, [&](const uint4& chunk) {
            for (uint32_t pair : {chunk.x, chunk.y, chunk.z, chunk.w}) {
                for (uint32_t size : {pair << 16 & 0x7fffffffu, pair & 0x7fff0000u})
                    largest = max(largest, size < kInfinityBits ? size : 0);
            }
        });
        largest = __reduce_max_sync(~0u, largest);
        // Brings the largest below 2^15; float32 has this power of two and its inverse.
        const int32_t exponent = max(static_cast<int32_t>(largest >> 23) - 127, -100) - 14;
        const float factor = power_of_two(-exponent);
        for_each_chunk(tile, num_rows, [&](uint4& chunk) {
            auto convert = [&](uint32_t pair) {
                const float2 numbers = unpack<bfloat16>(pair);
                return pack<float16>(numbers.x * factor, numbers.y * factor);
            };
            chunk = make_uint4(convert(chunk.x), convert(chunk.y), convert(chunk.z), convert(chunk.w));
        });
        ptx::fence_proxy_async();
        __syncwarp();
        return power_of_two(exponent);
    }
    // Calls body(chunk) for the rows of queries, 16 bytes at a time. What lies behind the rows is not part of
    // the queries.
    template <class Body>
    __device__ static void for_each_chunk(unsigned char* tile, int32_t num_rows, Body body) {
        const int num_chunks = num_rows * (Config::kRowBytes / 16);  // in one block of columns
        for (int block = 0; block < Config::kColumnBlocks; ++block) {
            auto* const chunks = reinterpret_cast<uint4*>(tile + block * Config::kQBlockBytes);
#pragma unroll 2
            for (int i = threadIdx.x % 32; i < num_chunks; i += 32) body(chunks[i]);
        }
    }

    const AttentionParams& p_;
    const Sm90Launch& plan_;
    Sm90Shared<Config>& shared_;
    const int group_;
};

}  // namespace octavo::cuda
