// The producer's warps: one loads Q, K and V, another stores results.
#pragma once

#include "cuda/prefill/shared.cuh"
#include "cuda/ptx/tma.h"
#include "cuda/ptx/warpgroup.h"

namespace octavo::cuda {

// Where one warpgroup's rows of a row tile lie in q and out.
struct QueryPlace {
    int32_t place, shift, outer;

    __device__ QueryPlace(const ForwardParams& p, const PrefillPlan& plan, const PrefillWork& work, int group)
        : place(plan.q_edge - work.seqlen_q + work.first_token + group * plan.tokens),
          shift(work.q_begin + work.seqlen_q),
          outer(p.cu_seqlens_q ? 0 : work.batch) {}
};

// Loads tiles of K and V of one row tile.
template <class Config>
class KeyLoader {
  public:
    __device__ KeyLoader(const ForwardParams& p, const PrefillPlan& plan, const PrefillWork& work)
        : p_(p),
          plan_(plan),
          work_(work),
          kv_head_(work.first_head / p.group_size()),
          hole_begin_(work.prefix_len),
          hole_end_(work.visibility(p).window_begin(work.q_pos(0))) {}

    // The page of box `lane` of the tile; what the other functions take. Unused unless paged.
    __device__ int32_t find_pages(int32_t first_key) const {
        const int32_t key = first_key + threadIdx.x % 32 * plan_.box_keys;
        if (!p_.paged() || key >= min(work_.seqlen_k, first_key + Config::kKeys)) return 0;
        return p_.page_table[work_.batch * p_.page_table_stride + key / p_.page_size];
    }

    // Fills `tile` [column blocks, keys, 64]; its bytes count towards `full`.
    __device__ void load(const CUtensorMap& map, unsigned char* tile, uint64_t* full, int32_t first_key,
                         int32_t pages) const {
        const bool elected = ptx::elect_one();
        if (elected) ptx::mbarrier_arrive_expect(full, Config::kKeyTileBytes);
        for (int box = 0, keys = 0; keys < Config::kKeys; ++box, keys += plan_.box_keys) {
            const int32_t key = first_key + keys;
            int32_t place = plan_.k_edge - work_.seqlen_k + key, shift = work_.k_begin + work_.seqlen_k;
            int32_t outer = p_.cu_seqlens_k ? 0 : work_.batch;
            if (p_.paged()) {
                outer = __shfl_sync(~0u, pages, box);
                const int32_t offset = key % p_.page_size;
                shift = min(work_.seqlen_k - (key - offset), p_.page_size);
                place = key < work_.seqlen_k ? p_.page_size - shift + offset : p_.page_size;
            }
            if (!elected) continue;
#pragma unroll
            for (int block = 0; block < Config::kColumnBlocks; ++block) {
                ptx::tma_load(tile + block * Config::kKeyBlockBytes + keys * Config::kRowBytes, &map, full,
                              block * Config::kBlockColumns, kv_head_, place, shift, outer);
            }
        }
        __syncwarp();
    }

    // Keys between the prefix and the first query's window: in the sequence, but seen by no query. What V
    // holds there must not spoil the product with weights of zero.
    __device__ bool has_hole(int32_t first_key) const {
        return first_key < hole_end_ && first_key + Config::kKeys > hole_begin_ && hole_begin_ < hole_end_;
    }
    __device__ void fill_hole(unsigned char* tile, int32_t first_key) const {
        const int32_t begin = max(hole_begin_ - first_key, 0);
        const int32_t end = min(hole_end_ - first_key, Config::kKeys);
        for (int block = 0; block < Config::kColumnBlocks; ++block) {
            auto* const rows = reinterpret_cast<uint32_t*>(tile + block * Config::kKeyBlockBytes);
            for (int32_t row = begin; row < end; ++row) rows[row * 32 + threadIdx.x % 32] = 0;
        }
        ptx::fence_proxy_async();
        __syncwarp();
    }

  private:
    const ForwardParams& p_;
    const PrefillPlan& plan_;
    const PrefillWork& work_;
    int32_t kv_head_;
    int32_t hole_begin_, hole_end_;
};

template <class Config>
__device__ __forceinline__ void load_q(const ForwardParams& p, const PrefillPlan& plan,
                                       const PrefillWork& work, PrefillShared<Config>& shared,
                                       const Ring<Config::kQSlots>& ring) {
    for (int group = 0; group < Config::kConsumers; ++group) {
        uint64_t* const full = &shared.q_full[ring.slot][group];
        ptx::mbarrier_wait(&shared.q_empty[ring.slot][group], ring.parity ^ 1);
        if (ptx::elect_one()) {
            const QueryPlace at(p, plan, work, group);
            ptx::mbarrier_arrive_expect(full,
                                        Config::kColumnBlocks * plan.heads * plan.tokens * Config::kRowBytes);
#pragma unroll
            for (int block = 0; block < Config::kColumnBlocks; ++block) {
                ptx::tma_load(shared.q[ring.slot][group] + block * Config::kQBlockBytes, &plan.q, full,
                              block * Config::kBlockColumns, work.first_head, at.place, at.shift, at.outer);
            }
        }
        __syncwarp();
    }
}

// One warp: runs ahead of the consumers as far as the slots allow, over the ends of row tiles too.
template <class Config>
__device__ void run_loader(const ForwardParams& p, const PrefillPlan& plan, PrefillShared<Config>& shared) {
    PrefillScheduler scheduler(p, plan, Config::kConsumers * plan.tokens);
    Ring<Config::kQSlots> q_ring;
    Ring<Config::kStages> k_ring, v_ring;
    Ring<kPrefillWorkSlots> work_ring;
    uint32_t patch_parity = 0;
    while (true) {
        const PrefillWork work = scheduler.work();
        ptx::mbarrier_wait(&shared.work_empty[work_ring.slot], work_ring.parity ^ 1);
        if (threadIdx.x % 32 == 0) {
            shared.work[work_ring.slot] = work;
            ptx::mbarrier_arrive(&shared.work_full[work_ring.slot]);
        }
        work_ring.advance();
        if (work.batch < 0) break;
        scheduler.request();

        const KeyTiles tiles = key_tiles<Config>(p, plan, work);
        const KeyLoader<Config> loader(p, plan, work);
        int32_t v_pages = 0, k_pages = tiles.count > 0 ? loader.find_pages(tiles.start(tiles.count - 1)) : 0;
        // K runs one tile ahead of V, as in the consumers.
        for (int32_t i = tiles.count; i >= 0; --i) {
            if (i > 0) {
                ptx::mbarrier_wait(&shared.k_empty[k_ring.slot], k_ring.parity ^ 1);
                loader.load(plan.k, shared.k[k_ring.slot], &shared.k_full[k_ring.slot], tiles.start(i - 1),
                            k_pages);
                k_ring.advance();
            }
            if (i == tiles.count) {
                load_q<Config>(p, plan, work, shared, q_ring);
                q_ring.advance();
            } else {
                const int32_t first_key = tiles.start(i);
                unsigned char* const tile = shared.v[v_ring.slot];
                uint64_t* const full = &shared.v_full[v_ring.slot];
                ptx::mbarrier_wait(&shared.v_empty[v_ring.slot], v_ring.parity ^ 1);
                if (loader.has_hole(first_key)) {
                    loader.load(plan.v, tile, &shared.patch, first_key, v_pages);
                    ptx::mbarrier_wait(&shared.patch, patch_parity);
                    patch_parity ^= 1;
                    loader.fill_hole(tile, first_key);
                    if (ptx::elect_one()) ptx::mbarrier_arrive(full);
                } else {
                    loader.load(plan.v, tile, full, first_key, v_pages);
                }
                v_ring.advance();
            }
            v_pages = k_pages;
            if (i > 1) k_pages = loader.find_pages(tiles.start(i - 2));
        }
        scheduler.advance();
    }
    scheduler.finish();
}

// One warp: sends the consumers' results on their way, so that none waits for a store.
template <class Config>
__device__ void run_storer(const ForwardParams& p, const PrefillPlan& plan, PrefillShared<Config>& shared) {
    Ring<Config::kQSlots> q_ring;
    Ring<kPrefillWorkSlots> work_ring;
    for (uint32_t parity = 0;; parity ^= 1) {
        const PrefillWork work = take_work<Config>(shared, work_ring);
        if (work.batch < 0) return;
        for (int group = 0; group < Config::kConsumers; ++group) {
            ptx::mbarrier_wait(&shared.out_full[group], parity);
            if (ptx::elect_one()) {
                const QueryPlace at(p, plan, work, group);
#pragma unroll
                for (int block = 0; block < Config::kColumnBlocks; ++block) {
                    ptx::tma_store(&plan.out, shared.q[q_ring.slot][group] + block * Config::kQBlockBytes,
                                   block * Config::kBlockColumns, work.first_head, at.place, at.shift,
                                   at.outer);
                }
                ptx::tma_store_commit();
                ptx::tma_store_wait_read<0>();
                ptx::mbarrier_arrive(&shared.q_empty[q_ring.slot][group]);
            }
            __syncwarp();
        }
        q_ring.advance();
    }
}

}  // namespace octavo::cuda
