// Computes dQ in a kernel of its own, where dK and dV leave no registers for it, or where bits must be the
// same at every call. Scores and products are computed once more, and nothing is summed in global memory.
//
// A CTA owns a tile of queries of one head, 64 a warpgroup, and walks the keys that some of them see:
//
//     S = Q K^T and dP = dO V^T               (SS)
//     P = exp2(S - LSE), dS = P * (dP - delta)
//     dQ += dS K                              (RS)
//
// grid: tiles of queries of all sequences and heads, in the order of plan.query_order.
#pragma once

#include "cuda/ptx/exp2.h"
#include "cuda/ptx/grid_dependency.h"
#include "cuda/ptx/stmatrix.h"
#include "cuda/ptx/tma.h"
#include "cuda/ptx/warpgroup.h"
#include "cuda/ptx/wgmma.h"
#include "cuda/sm90_backward/prepare.cuh"
#include "cuda/sm90_backward/shared.cuh"
#include "cuda/types.h"

namespace octavo::cuda {

template <class Config>
struct Sm90QueryGradientsShared {
    // The copy engine moves the same tiles as for sm90_backward_kernel.
    static constexpr int kQueryTiles = kSm90GradientQueries / Config::kQueries;
    static constexpr int kKStages = 2, kVStages = Config::kHeadDim < 256 ? 2 : 1;

    alignas(1024) unsigned char q[kQueryTiles][Config::kQueryTileBytes];  // at the end dQ
    alignas(1024) unsigned char dout[kQueryTiles][Config::kQueryTileBytes];
    alignas(1024) unsigned char k[kKStages][Config::kKeyTileBytes];
    alignas(1024) unsigned char v[kVStages][Config::kKeyTileBytes];
    uint64_t q_full, k_full[kKStages], k_empty[kKStages], v_full[kVStages], v_empty[kVStages];

    __device__ void init() {
        ptx::mbarrier_init(&q_full, 1);
        for (int i = 0; i < kKStages; ++i) {
            ptx::mbarrier_init(&k_full[i], 1);
            ptx::mbarrier_init(&k_empty[i], 4 * kSm90GradientGroups);
        }
        for (int i = 0; i < kVStages; ++i) {
            ptx::mbarrier_init(&v_full[i], 1);
            ptx::mbarrier_init(&v_empty[i], 4 * kSm90GradientGroups);
        }
        ptx::mbarrier_init_fence();
    }
};

// The slot of the i-th tile in a ring of kSlots, and the parity of the phase that fills it.
template <int kSlots>
struct RingSlot {
    uint32_t index, parity;
    __device__ explicit RingSlot(int32_t i)
        : index(static_cast<uint32_t>(i) % kSlots), parity(static_cast<uint32_t>(i) / kSlots % 2) {}
};

// The queries of a CTA, and the keys that it walks.
template <class Config>
struct Sm90QueryTile {
    SequenceSlice seq;
    KeyTiles keys;
    int32_t batch, head, first_query, num_queries;

    // num_queries is 0 past the last tile.
    __device__ Sm90QueryTile(const AttentionBackwardParams& p, const Sm90BackwardLaunch& plan) {
        const HeadTile own =
            find_head_tile<kSm90GradientQueries>(plan.query_order.of(blockIdx.x), p.cu_seqlens_q, p.batch);
        const SequenceTile& tile = own.tile;
        num_queries = 0;
        if (tile.batch < 0) return;
        batch = tile.batch;
        head = own.head;
        seq = SequenceSlice::make(p, batch);
        first_query = tile.index * kSm90GradientQueries;
        num_queries = max(min(seq.seqlen_q - first_query, kSm90GradientQueries), 0);
        if (num_queries > 0) {
            keys = KeyTiles(seq.see, seq.q_pos(first_query), seq.q_pos(first_query + num_queries - 1),
                            Config::kKeys);
        }
    }
};

template <class Config>
__device__ __forceinline__ void load_query_tile(const AttentionBackwardParams& p,
                                                const Sm90BackwardLaunch& plan,
                                                const Sm90QueryTile<Config>& tile,
                                                Sm90QueryGradientsShared<Config>& shared) {
    using Shared = Sm90QueryGradientsShared<Config>;
    const int32_t head = tile.head, key_head = head / p.group_size() / plan.group_parts;
    const int32_t q_outer = query_outer(p, p.q_batch_stride, tile.batch);
    const int32_t dout_outer = query_outer(p, p.dout_strides.batch, tile.batch);
    const int32_t k_outer = p.cu_seqlens_k ? 0 : tile.batch;
    const int32_t q_begin = p.cu_seqlens_q ? p.cu_seqlens_q[tile.batch] : 0;
    const int32_t k_begin = p.cu_seqlens_k ? p.cu_seqlens_k[tile.batch] : 0;
    const int32_t seqlen_q = tile.seq.seqlen_q, seqlen_k = tile.seq.see.seqlen_k;
    // Tiles of no query stay as they are: their boxes lie outside the tensor altogether (ptx/tma.h), whose
    // first bytes are before the array's and may be mapped nowhere.
    const int query_tiles = (tile.num_queries + Config::kQueries - 1) / Config::kQueries;
    ptx::mbarrier_arrive_expect(&shared.q_full, 2 * query_tiles * Config::kQueryTileBytes);
#pragma unroll 1
    for (int i = 0; i < query_tiles; ++i) {
        const int32_t place = plan.q_edge - seqlen_q + tile.first_query + i * Config::kQueries;
#pragma unroll
        for (int block = 0; block < Config::kColumnBlocks; ++block) {
            const int offset = block * Config::kQueryBlockBytes;
            ptx::tma_load(shared.q[i] + offset, &plan.q, &shared.q_full, 64 * block, head, place,
                          q_begin + seqlen_q, q_outer);
            ptx::tma_load(shared.dout[i] + offset, &plan.dout, &shared.q_full, 64 * block, head, place,
                          q_begin + seqlen_q, dout_outer);
        }
    }
#pragma unroll 1
    for (int32_t i = 0; i < tile.keys.count; ++i) {
        const int32_t place = plan.k_edge - seqlen_k + tile.keys.start(i), shift = k_begin + seqlen_k;
        auto load = [&](unsigned char* to, const CUtensorMap& map, uint64_t* full) {
            ptx::mbarrier_arrive_expect(full, Config::kKeyTileBytes);
#pragma unroll
            for (int block = 0; block < Config::kColumnBlocks; ++block) {
                ptx::tma_load(to + block * Config::kKeyBlockBytes, &map, full, 64 * block, key_head, place,
                              shift, k_outer);
            }
        };
        const RingSlot<Shared::kKStages> k_slot(i);
        const RingSlot<Shared::kVStages> v_slot(i);
        ptx::mbarrier_wait(&shared.k_empty[k_slot.index], k_slot.parity ^ 1);
        load(shared.k[k_slot.index], plan.k, &shared.k_full[k_slot.index]);
        ptx::mbarrier_wait(&shared.v_empty[v_slot.index], v_slot.parity ^ 1);
        load(shared.v[v_slot.index], plan.v, &shared.v_full[v_slot.index]);
    }
}

template <class T, class Config>
class Sm90QueryConsumer {
    using Shared = Sm90QueryGradientsShared<Config>;

  public:
    __device__ Sm90QueryConsumer(const AttentionBackwardParams& p, const Sm90BackwardLaunch& plan,
                                 const Sm90QueryTile<Config>& tile, Shared& shared, int group)
        : p_(p), plan_(plan), tile_(tile), shared_(shared), group_(group) {}

    __device__ __forceinline__ void run() {
        float dq[kSums];
#pragma unroll
        for (int i = 0; i < kSums; ++i) dq[i] = 0.0f;
        float minus_lse[2], minus_delta[2];
        read_statistics(minus_lse, minus_delta);
        ptx::mbarrier_wait(&shared_.q_full, 0);
#pragma unroll 1
        for (int32_t i = 0; i < tile_.keys.count; ++i) {
            const int32_t first_key = tile_.keys.start(i);
            const RingSlot<Shared::kKStages> k_slot(i);
            const RingSlot<Shared::kVStages> v_slot(i);
            unsigned char* const keys = shared_.k[ptx::uniform(k_slot.index)];
            const unsigned char* const values = shared_.v[ptx::uniform(v_slot.index)];
            float scores[kScores], products[kScores];
            ptx::mbarrier_wait(&shared_.k_full[k_slot.index], k_slot.parity);
            clear_unseen_keys(keys, first_key);
            multiply(scores, rows_of(shared_.q), keys);
            ptx::mbarrier_wait(&shared_.v_full[v_slot.index], v_slot.parity);
            multiply(products, rows_of(shared_.dout), values);
            ptx::wgmma_wait<1>();
            ptx::wgmma_results(scores);
#pragma unroll
            for (int j = 0; j < kScores; ++j)
                scores[j] = ptx::exp2_approx(fmaf(scores[j], plan_.scale_log2, minus_lse[j / 2 % 2]));
            // This branch keeps the exponentials before the wait for the products: ptxas moves the wait up,
            // but not past a branch.
            const bool masked = is_masked(first_key);
            if (masked) {
                mask(first_key, [&](int j, bool sees_even, bool sees_odd) {
                    scores[2 * j] = sees_even ? scores[2 * j] : 0.0f;
                    scores[2 * j + 1] = sees_odd ? scores[2 * j + 1] : 0.0f;
                });
            }
            ptx::wgmma_wait<0>();
            ptx::wgmma_results(products);
            arrive(&shared_.v_empty[v_slot.index]);
            uint32_t gradients[kScores / 2];
#pragma unroll
            for (int j = 0; j < kScores / 2; ++j) {
                const float delta = minus_delta[j % 2];
                gradients[j] = pack<T>(scores[2 * j] * (products[2 * j] + delta),
                                       scores[2 * j + 1] * (products[2 * j + 1] + delta));
            }
            if (masked) {  // products with keys that are not seen may be anything
                mask(first_key, [&](int j, bool sees_even, bool sees_odd) {
                    gradients[j] &= (sees_even ? 0xffffu : 0u) | (sees_odd ? 0xffff0000u : 0u);
                });
            }
            ptx::wgmma_fence();
            const uint64_t b = ptx::wgmma_descriptor(ptx::shared_address(keys), Config::kKeyBlockBytes);
#pragma unroll
            for (int step = 0; step < Config::kKeys / 16; ++step)
                ptx::Wgmma<T, Config::kHeadDim>::rs(dq, &gradients[4 * step],
                                                    b + step * 16 * Config::kRowBytes / 16);
            ptx::wgmma_commit();
            ptx::wgmma_wait<0>();
            ptx::wgmma_results(dq);
            arrive(&shared_.k_empty[k_slot.index]);
        }
        store(dq);
    }

  private:
    static constexpr int kScores = Config::kKeys / 2;
    static constexpr int kSums = Config::kHeadDim / 2;

    __device__ static int lane() { return threadIdx.x % 32; }
    __device__ static int warp() { return threadIdx.x % 128 / 32; }
    // This lane's first query, among those of the sequence. Its other one lies eight behind.
    __device__ int32_t query() const { return tile_.first_query + 64 * group_ + 16 * warp() + lane() / 4; }
    // This warpgroup's part of the CTA's queries, in the first block of columns.
    template <class Tiles>
    __device__ auto* rows_of(Tiles& tiles) const {
        constexpr int kGroups = Config::kQueries / 64;  // groups of 64 queries in a tile
        return tiles[group_ / kGroups] + group_ % kGroups * 64 * Config::kRowBytes;
    }
    __device__ static void arrive(uint64_t* barrier) {
        __syncwarp();
        if (lane() == 0) ptx::mbarrier_arrive(barrier);
    }

    // Reads -LSE in units of the exponent, and -delta in units of products.
    __device__ __forceinline__ void read_statistics(float (&minus_lse)[2], float (&minus_delta)[2]) const {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int32_t row = query() + 8 * half;
            minus_lse[half] = -INFINITY;
            minus_delta[half] = 0.0f;
            if (row >= tile_.seq.seqlen_q) continue;
            const int64_t place = tile_.head * plan_.num_rows +
                                  first_workspace_row<Config::kQueries>(plan_, p_.cu_seqlens_q, tile_.batch) +
                                  row;
            minus_lse[half] =
                sum_of_terms(static_cast<const BfloatTerms*>(plan_.lse)[place]) * plan_.scale_log2;
            minus_delta[half] = sum_of_terms(static_cast<const BfloatTerms*>(plan_.delta)[place]);
        }
    }

    __device__ __forceinline__ void multiply(float (&results)[kScores], const unsigned char* queries,
                                             const unsigned char* keys) const {
        const uint64_t a = ptx::wgmma_descriptor(ptx::shared_address(queries), 0);
        const uint64_t b = ptx::wgmma_descriptor(ptx::shared_address(keys), 0);
        ptx::wgmma_fence();
#pragma unroll
        for (int step = 0; step < Config::kHeadDim / 16; ++step) {
            const int block = step / 4, offset = step % 4 * 32;
            ptx::Wgmma<T, Config::kKeys>::ss(results, a + (block * Config::kQueryBlockBytes + offset) / 16,
                                             b + (block * Config::kKeyBlockBytes + offset) / 16, step != 0);
        }
        ptx::wgmma_commit();
    }

    // Whether some query of the CTA does not see some key of the tile.
    __device__ bool is_masked(int32_t first_key) const {
        return first_key + Config::kKeys > tile_.seq.see.seqlen_k ||
               !KeyTiles::all_visible(tile_.seq.see, tile_.seq.q_pos(tile_.first_query),
                                      tile_.seq.q_pos(tile_.first_query + tile_.num_queries - 1), first_key,
                                      Config::kKeys);
    }
    // Calls `apply` for each pair of elements of this lane, and says which of the two keys its query sees.
    template <class Apply>
    __device__ __forceinline__ void mask(int32_t first_key, Apply apply) const {
        const Visibility& see = tile_.seq.see;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int32_t q_pos = tile_.seq.q_pos(query() + 8 * half);
            // The keys that this lane's query sees, as columns: of the prefix, and of the window.
            const int32_t first = first_key + 2 * (lane() % 4);
            const int32_t prefix = see.prefix_len - first, begin = see.window_begin(q_pos) - first;
            const int32_t end = see.window_end(q_pos) - first;
            auto sees = [&](int column) { return column < prefix || (column >= begin && column < end); };
#pragma unroll
            for (int j = half; j < kScores / 2; j += 2)
                apply(j, sees(4 * (j - half)), sees(4 * (j - half) + 1));
        }
    }

    // Clears keys that no query of the sequence sees: a NaN there would spoil products with gradients of
    // zero.
    __device__ __forceinline__ void clear_unseen_keys(unsigned char* tile, int32_t first_key) const {
        const KeyTiles seen(tile_.seq.see, tile_.seq.q_pos(0), tile_.seq.q_pos(tile_.seq.seqlen_q - 1),
                            Config::kKeys);
        const int32_t last = min(first_key + Config::kKeys, tile_.seq.see.seqlen_k);
        if (last <= seen.prefix_end || (first_key >= seen.window_begin && last <= seen.window_end)) return;
        for (int row = 4 * group_ + warp(); first_key + row < last; row += 4 * kSm90GradientGroups) {
            if (seen.needed(first_key + row)) continue;
#pragma unroll
            for (int block = 0; block < Config::kColumnBlocks; ++block)
                *reinterpret_cast<uint32_t*>(tile + block * Config::kKeyBlockBytes + row * Config::kRowBytes +
                                             4 * lane()) = 0;
        }
        ptx::fence_proxy_async();
        ptx::named_barrier_sync(3, 128 * kSm90GradientGroups);
    }

    // Writes dQ over Q, which only this warpgroup reads. The copy engine leaves out what lies past the last
    // query.
    __device__ __forceinline__ void store(const float (&dq)[kSums]) const {
        unsigned char* const rows = rows_of(shared_.q);
        const float scale = p_.softmax_scale * p_.out_scale;
        ptx::named_barrier_sync(1 + group_, 128);
#pragma unroll
        for (int i = 0; i < Config::kHeadDim / 16; ++i) {
            const int row = 16 * warp() + lane() % 16, column = (i % 4 * 2 + lane() / 16) ^ (lane() % 8);
            auto pair = [&](int j) { return pack<T>(dq[8 * i + j] * scale, dq[8 * i + j + 1] * scale); };
            ptx::stmatrix_x4(rows + i / 4 * Config::kQueryBlockBytes + row * Config::kRowBytes + 16 * column,
                             pair(0), pair(2), pair(4), pair(6));
        }
        ptx::fence_proxy_async();
        ptx::named_barrier_sync(1 + group_, 128);
        if (threadIdx.x % 128 != 0 || 64 * group_ >= tile_.num_queries) return;
        const int32_t seqlen_q = tile_.seq.seqlen_q, outer = p_.cu_seqlens_q ? 0 : tile_.batch;
        const int32_t shift = (p_.cu_seqlens_q ? p_.cu_seqlens_q[tile_.batch] : 0) + seqlen_q;
#pragma unroll
        for (int block = 0; block < Config::kColumnBlocks; ++block) {
            ptx::tma_store(&plan_.dq, rows + block * Config::kQueryBlockBytes, 64 * block, tile_.head,
                           plan_.q_edge - seqlen_q + tile_.first_query + 64 * group_, shift, outer);
        }
        ptx::tma_store_commit();
        ptx::tma_store_wait_read<0>();
    }

    const AttentionBackwardParams& p_;
    const Sm90BackwardLaunch& plan_;
    const Sm90QueryTile<Config>& tile_;
    Shared& shared_;
    const int group_;
};

template <class T, class Config>
__global__ void __launch_bounds__(128 * (1 + kSm90GradientGroups), 1)
    sm90_query_gradients_kernel(const __grid_constant__ AttentionBackwardParams p,
                                const __grid_constant__ Sm90BackwardLaunch plan) {
    extern __shared__ __align__(1024) unsigned char shared_bytes[];
    auto& shared = *reinterpret_cast<Sm90QueryGradientsShared<Config>*>(shared_bytes);
    const int group = __shfl_sync(~0u, threadIdx.x / 128, 0);
    if (threadIdx.x == 0) {
        shared.init();
        for (const CUtensorMap* map : {&plan.q, &plan.dout, &plan.k, &plan.v, &plan.dq})
            ptx::tma_prefetch_map(map);
    }
    __syncthreads();
    ptx::launch_dependents();
    ptx::wait_for_previous_grid();
    if (group == 0) {
        ptx::lower_registers<24>();
        const Sm90QueryTile<Config> tile(p, plan);
        if (tile.num_queries > 0 && threadIdx.x == 0) load_query_tile<Config>(p, plan, tile, shared);
    } else {
        ptx::raise_registers<240>();
        const Sm90QueryTile<Config> tile(p, plan);
        if (tile.num_queries > 0) Sm90QueryConsumer<T, Config>(p, plan, tile, shared, group - 1).run();
    }
}

}  // namespace octavo::cuda
