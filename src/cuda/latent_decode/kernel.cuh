// Attention of up to 16 rows of each sequence over a paged cache of latents, in one launch (sm_90). All rows
// attend to the one latent head, so that a key is read once; its first 512 numbers are the value. Page:
// docs/kernels/latent_decode.md.
//
// grid: at most a CTA for each SM. Each has an equal run of all tiles of keys (schedule.cuh). Four warps copy
// tiles (producer.cuh), as many as there is room for, across the ends of sequences. Eight warps multiply. For
// each tile
//  - each multiplies all rows with a quarter of the keys, over half of their numbers, with the queries in
//    registers;
//  - each turns the scores of half of the keys, which have gone through shared memory, into weights, and
//    multiplies these with a quarter of the columns of the values.
// The scores of a tile are made before the values of the one before it are multiplied, so that there is one
// barrier for each tile.
#pragma once

#include "cuda/latent_decode/earlier_runs.cuh"
#include "cuda/latent_decode/producer.cuh"
#include "cuda/latent_decode/products.cuh"
#include "cuda/latent_decode/queries.cuh"
#include "cuda/latent_decode/rows.cuh"
#include "cuda/latent_decode/softmax.cuh"
#include "cuda/latent_decode/tiles.cuh"
#include "cuda/ptx/grid_dependency.h"
#include "cuda/ptx/mbarrier.h"
#include "cuda/ptx/warpgroup.h"

#include <cstdint>

namespace octavo::cuda {

// The consumers: eight warps that multiply the tiles of a CTA, one sequence after the other.
template <class Config>
class LatentDecodeConsumer {
  public:
    __device__ LatentDecodeConsumer(const LatentAttentionParams& p, const LatentLaunch& launch,
                                    LatentDecodeShared<Config>& shared)
        : p_(p), launch_(launch), shared_(shared) {
        const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
        const int depth = warp / Config::kKeyGroups, key = warp % Config::kKeyGroups * Config::kGroupKeys;
        scores_ = (depth * kLatentRows + lane / 4) * Config::kScoreStride + key + 2 * (lane % 4);
        pin_in_register(scores_);
    }

    // Multiplies the tiles of a segment. All consumers call it together.
    __device__ LatentRowsOfCta<Config> multiply(const LatentSegment& segment,
                                                const LatentSequence& sequence) {
        barrier();  // the exchange of the segment before this one is over
        copy_latent_queries(p_, launch_, sequence, shared_);
        barrier();
        products_.load_queries(shared_.queries);
        int32_t end_keys[2];
        float factors[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int row = threadIdx.x % 32 / 4 + 8 * i;
            const int32_t query = min(launch_.num_q_heads.quotient(row), sequence.seqlen_q - 1);
            end_keys[i] = min(sequence.end_key(p_.causal, query), sequence.seqlen_k);
            factors[i] = p_.softmax_scale * kLog2e * (Config::kFp8 ? shared_.query_unit[row] : 1.0f);
        }
        LatentRowsSoftmax<Config> softmax(end_keys, factors);
        score(0);
#pragma unroll 1
        for (int32_t tile = segment.begin; tile < segment.end; ++tile) {
            const int which = (tile - segment.begin) % 2, stage = stage_;
            advance();
            barrier();  // the scores of the tile are there
            if (tile + 1 < segment.end) score(which ^ 1);
            uint32_t weights[Config::kPartSteps][4];
            softmax.weigh(weights, shared_.scores[which], tile * Config::kKeys);
            products_.multiply_values(softmax.out, weights, ptx::shared_address(shared_.tiles[stage]));
            __syncwarp();
            if (threadIdx.x % 32 == 0) ptx::mbarrier_arrive(&shared_.empty[stage]);
        }
        return LatentRowsOfCta<Config>(softmax, shared_);
    }

  private:
    __device__ static void barrier() { ptx::named_barrier_sync(kConsumersBarrier, kLatentDecodeConsumers); }

    // Waits for the current tile, and computes this warp's part of its scores.
    __device__ void score(int which) {
        ptx::mbarrier_wait(&shared_.full[stage_], parity_);
        float scores[Config::kGroupTiles][4];
        products_.multiply_keys(scores, ptx::shared_address(shared_.tiles[stage_]));
        float* const to = shared_.scores[which][0][0] + scores_;
#pragma unroll
        for (int tile = 0; tile < Config::kGroupTiles; ++tile) {
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                *reinterpret_cast<float2*>(to + 8 * i * Config::kScoreStride + 8 * tile) =
                    make_float2(scores[tile][2 * i], scores[tile][2 * i + 1]);
            }
        }
    }
    __device__ void advance() {
        if (++stage_ < Config::kStages) return;
        stage_ = 0;
        parity_ ^= 1;
    }

    const LatentAttentionParams& p_;
    const LatentLaunch& launch_;
    LatentDecodeShared<Config>& shared_;
    LatentProducts<Config> products_;
    int scores_;     // where this lane's scores lie
    int stage_ = 0;  // of the current tile
    uint32_t parity_ = 0;
};

// Registers of a thread: those of three warpgroups fill the SM.
constexpr int kLatentDecodeConsumerRegisters = 208, kLatentDecodeProducerRegisters = 88;

template <class Config>
__global__ void __launch_bounds__(kLatentDecodeThreads, 1)
    latent_decode_kernel(const __grid_constant__ LatentAttentionParams p,
                         const __grid_constant__ LatentLaunch launch) {
    extern __shared__ __align__(128) unsigned char latent_decode_bytes[];
    auto& shared = *reinterpret_cast<LatentDecodeShared<Config>*>(latent_decode_bytes);
    const auto cta = static_cast<int32_t>(grid_index(launch.partial).x);
    if (threadIdx.x < Config::kStages) {
        ptx::mbarrier_init(&shared.full[threadIdx.x], kLatentDecodeThreads - kLatentDecodeConsumers);
        ptx::mbarrier_init(&shared.empty[threadIdx.x], Config::kWarps);
    }
    ptx::launch_dependents();
    ptx::wait_for_previous_grid();
    const LatentDecodeSchedule<Config> schedule(
        p, shared.schedule, cta, static_cast<int32_t>(gridDim.x));  // all threads wait for each other
    if (schedule.is_empty()) return;
    const int warpgroup = __shfl_sync(~0u, static_cast<int>(threadIdx.x / 128), 0);
    if (warpgroup == kLatentDecodeConsumers / 128) {
        ptx::lower_registers<kLatentDecodeProducerRegisters>();
        return LatentDecodeProducer<Config>(p, launch, shared, schedule).run();
    }
    ptx::raise_registers<kLatentDecodeConsumerRegisters>();
    LatentDecodeConsumer<Config> consumer(p, launch, shared);
    auto words_of = [&](int32_t i) { return launch.partial.words + int64_t{i} * kLatentDecodePartialWords; };
    for (LatentSegment segment = schedule.last();; segment = schedule.before(segment.sequence)) {
        const LatentSequence sequence = LatentSequence::make(p, segment.sequence);
        LatentRowsOfCta<Config> rows = consumer.multiply(segment, sequence);
        const int32_t place = schedule.place_of(segment.sequence, segment.begin);
        const bool is_end = segment.end == segment.count;
        add_earlier_runs<kLatentDecodeFanIn>(rows, place, is_end,
                                             [&](int32_t back) { return words_of(cta - back); });
        if (is_end)
            rows.store(p, launch, sequence);
        else
            rows.push(words_of(cta));
        if (schedule.is_first(segment.sequence)) break;
    }
}

}  // namespace octavo::cuda
