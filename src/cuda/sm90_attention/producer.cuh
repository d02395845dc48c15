// The producer's warps: one loads Q and K (over codes, Q alone), one loads V, one stores results, and with
// splits one hands out the work. Where keys are gathered, all four gather, and two of them do the rest
// besides.
#pragma once

#include "cuda/ptx/l2_policy.h"
#include "cuda/ptx/tma.h"
#include "cuda/ptx/warpgroup.h"
#include "cuda/sm90_attention/gather.cuh"
#include "cuda/sm90_attention/shared.cuh"

namespace octavo::cuda {

// Loads tiles of K and V of one row tile.
template <class Config>
class KeyLoader {
  public:
    __device__ KeyLoader(const AttentionParams& p, const Sm90Launch& plan, const Sm90Work& work)
        : p_(p),
          plan_(plan),
          work_(work),
          kv_head_(work.first_head / p.group_size()),
          hole_begin_(work.prefix_len),
          hole_end_(work.visibility<Config>(p, 0, 1).window_begin(work.q_pos(0))),
          policy_(plan.heads == p.group_size() && work.seqlen_q <= Config::kTileBlocks * plan.tokens
                      ? ptx::kEvictFirst
                      : ptx::kEvictNormal) {}

    // The page of box `lane` of the tile, as load() takes it. Not used unless the arrays are paged.
    __device__ int32_t find_pages(int32_t first_key) const {
        const int32_t key = first_key + threadIdx.x % 32 * plan_.box_keys;
        if (!p_.paged() || key >= min(work_.seqlen_k, first_key + Config::kKeys)) return 0;
        return p_.page_table[work_.batch * p_.page_table_stride + plan_.page_size.quotient(key)];
    }

    // Fills `tile` [kBlocks, keys, 64], which is kBlocks blocks of columns from `first_column` on; its bytes
    // count towards `full`. Boxes without a key are left out: a box that lay outside the tensor altogether
    // ended in an illegal memory access.
    template <int kBlocks>
    __device__ void load(const CUtensorMap& map, unsigned char* tile, uint64_t* full, int32_t first_key,
                         int32_t pages, int first_column = 0) const {
        const bool elected = ptx::elect_one();
        const int32_t rows = loaded_rows(first_key);
        if (elected) ptx::mbarrier_arrive_expect(full, rows * kBlocks * Config::kRowBytes);
        if (p_.paged()) {
            int32_t offset = plan_.page_size.remainder(first_key);  // in its page
            for (int32_t box = 0, row = 0; row < rows; ++box, row += plan_.box_keys) {
                const int32_t page = __shfl_sync(~0u, pages, box);
                const int32_t used = min(work_.seqlen_k - (first_key + row - offset), p_.page_size);
                if (elected) {
                    load_box<kBlocks>(map, tile + row * Config::kRowBytes, full, first_column,
                                      p_.page_size - used + offset, used, page);
                }
                offset = offset + plan_.box_keys == p_.page_size ? 0 : offset + plan_.box_keys;
            }
        } else {
            // Each CTA of a pair loads half of the keys, or of the columns, for both CTAs.
            constexpr int kBoxes = Config::kSharesColumns ? 1 : Config::kCtas;
            bool mine = elected && (kBoxes == 1 || ptx::cluster_rank() == 0);
            for (int32_t row = 0; row < rows; row += Config::kKeys / kBoxes) {
                if (mine) {
                    load_box<kBlocks>(map, tile + row * Config::kRowBytes, full, first_column,
                                      plan_.k_edge - work_.seqlen_k + first_key + row,
                                      work_.k_begin + work_.seqlen_k, p_.cu_seqlens_k ? 0 : work_.batch);
                }
                mine = elected && !mine;
            }
        }
        __syncwarp();
    }

    // Whether the tile has rows of V that no copy zeroes, and that could spoil the product although their
    // weights are zero: keys between the prefix and the first query's window, which no query sees, and boxes
    // past the last key.
    __device__ bool has_holes(int32_t first_key) const {
        const bool unseen =
            hole_begin_ < hole_end_ && first_key < hole_end_ && first_key + Config::kKeys > hole_begin_;
        return unseen || loaded_rows(first_key) < Config::kKeys;
    }
    template <int kBlocks>
    __device__ void fill_holes(unsigned char* tile, int32_t first_key) const {
        zero_rows<kBlocks>(tile, max(hole_begin_ - first_key, 0), min(hole_end_ - first_key, Config::kKeys));
        zero_rows<kBlocks>(tile, loaded_rows(first_key), Config::kKeys);
        ptx::fence_proxy_async();
        __syncwarp();
    }

  private:
    // How many rows of a tile are loaded: whole boxes, each of which holds at least one key.
    __device__ int32_t loaded_rows(int32_t first_key) const {
        if (first_key + Config::kKeys <= work_.seqlen_k || (Config::kCtas == 1 && !p_.paged())) {
            return Config::kKeys;
        }
        const int32_t keys = work_.seqlen_k - first_key;
        int32_t rows = 0;
        while (rows < keys) rows += plan_.box_keys;
        return rows;
    }
    template <int kBlocks>
    __device__ static void zero_rows(unsigned char* tile, int32_t begin, int32_t end) {
        for (int block = 0; block < kBlocks; ++block) {
            auto* const rows = reinterpret_cast<uint32_t*>(tile + block * Config::kKeyBlockBytes);
            for (int32_t row = begin; row < end; ++row) rows[row * 32 + threadIdx.x % 32] = 0;
        }
    }
    template <int kBlocks>
    __device__ void load_box(const CUtensorMap& map, unsigned char* rows, uint64_t* full, int first_column,
                             int32_t place, int32_t shift, int32_t outer) const {
        const int first_block = Config::kSharesColumns ? ptx::cluster_rank() : 0;
#pragma unroll(kBlocks <= 2 ? 2 : 1)
        for (int block = first_block; block < kBlocks; block += Config::kSharesColumns ? Config::kCtas : 1) {
            unsigned char* const to = rows + block * Config::kKeyBlockBytes;
            const int column = first_column + block * Config::kBlockColumns;
            if constexpr (Config::kCtas == 1) {
                ptx::tma_load(to, &map, full, policy_, column, kv_head_, place, shift, outer);
            } else {
                ptx::tma_load_multicast(to, &map, full, 3, column, kv_head_, place, shift, outer);
            }
        }
    }

    const AttentionParams& p_;
    const Sm90Launch& plan_;
    const Sm90Work& work_;
    int32_t kv_head_;
    int32_t hole_begin_, hole_end_;
    uint64_t policy_;  // lets keys and values that no other row tile needs leave the L2 cache first
};

// One thread: sends a warpgroup's result, which lies in the slot of its queries, on its way, and waits until
// the slot may be overwritten.
template <class Config>
__device__ __forceinline__ void send_result(const Sm90Launch& plan, Sm90Shared<Config>& shared, int slot,
                                            int group, bool any, const QueryPlace& to) {
#pragma unroll
    for (int block = 0; any && block < Config::kValueBlocks; ++block) {
        ptx::tma_store(&plan.out, shared.q[slot][group] + block * Config::kQBlockBytes,
                       block * Config::kBlockColumns, to.first_head, to.place, to.shift, to.outer);
    }
    ptx::tma_store_commit();
    ptx::tma_store_wait_read<0>();
}

// One warp, where keys are gathered: frees a slot of queries of a warpgroup, by sending the result on its way
// that took the place of those before.
template <class Config>
__device__ __forceinline__ void send_earlier_result(const Sm90Launch& plan, Sm90Shared<Config>& shared,
                                                    const Ring<Config::kQSlots>& ring, int group) {
    ptx::mbarrier_wait(&shared.out_full[ring.slot][group], ring.parity ^ 1);
    if (ptx::elect_one()) {
        const QueryPlace& to = shared.result_places[ring.slot][group];
        const bool any = to.any && (!Config::kSplits || shared.complete[ring.slot][group]);
        send_result(plan, shared, ring.slot, group, any, to);
    }
    __syncwarp();
}

template <class Config>
__device__ __forceinline__ void load_q(const AttentionParams& p, const Sm90Launch& plan, const Sm90Work& work,
                                       Sm90Shared<Config>& shared, const Ring<Config::kQSlots>& ring) {
    for (int group = 0; group < Config::kConsumers; ++group) {
        uint64_t* full = &shared.q_full[ring.slot][group];
        if constexpr (Config::kHasCodes) full = &shared.query_scales.loaded[ring.slot][group];
        if constexpr (Config::kGathers)
            send_earlier_result(plan, shared, ring, group);
        else
            ptx::mbarrier_wait(&shared.q_empty[ring.slot][group], ring.parity ^ 1);
        const QueryPlace at(p, plan, work, tile_block<Config>(group), p.q_batch_stride);
        const int32_t bytes = Config::kColumnBlocks * plan.heads * plan.tokens * Config::kRowBytes;
        if (ptx::elect_one()) {
            if constexpr (Config::kGathers) {
                const QueryPlace to(p, plan, work, tile_block<Config>(group), p.out_batch_stride);
                shared.result_places[ring.slot][group] = to;
            }
            ptx::mbarrier_arrive_expect(full, at.any ? bytes : 0);
#pragma unroll
            for (int block = 0; at.any && block < Config::kColumnBlocks; ++block) {
                ptx::tma_load(shared.q[ring.slot][group] + block * Config::kQBlockBytes, &plan.q, full,
                              block * Config::kBlockColumns, at.first_head, at.place, at.shift, at.outer);
            }
        }
        __syncwarp();
    }
}

// Puts work into the ring of each CTA of the cluster; every lane calls this.
template <class Config, class Shared>
__device__ __forceinline__ void publish(const Sm90Work& work, Shared& shared, Ring<kSm90WorkSlots>& ring) {
    ptx::mbarrier_wait(&shared.work_empty[ring.slot], ring.parity ^ 1);
    Sm90Work* const slot = &shared.work[ring.slot];
    uint64_t* const full = &shared.work_full[ring.slot];
    const uint32_t lane = threadIdx.x % 32;
    if constexpr (Config::kCtas == 1) {
        if (lane == 0) {
            *slot = work;
            ptx::mbarrier_arrive(full);
        }
    } else if (lane < Config::kCtas) {
        const uint32_t to = ptx::cluster_address(ptx::shared_address(slot), lane);
        const uint32_t barrier = ptx::cluster_address(ptx::shared_address(full), lane);
        ptx::mbarrier_arrive_expect_cluster(barrier, sizeof(Sm90Work));
        ptx::store_cluster_async(to, make_int4(work.batch, work.first_head, work.first_token, work.seqlen_q),
                                 barrier);
        ptx::store_cluster_async(
            to + 16, make_int4(work.seqlen_k, work.prefix_len, work.q_begin, work.k_begin), barrier);
    }
    ring.advance();
}

// One warp: hands out the work. It draws the next item when the current one begins to be loaded, as the
// loading warp does elsewhere, and looks for it meanwhile.
template <class Config>
__device__ void run_scheduler(const AttentionParams& p, const Sm90Launch& plan, Sm90Shared<Config>& shared) {
    Sm90Scheduler<Config> scheduler(p, plan);
    scheduler.look_at_lengths();
    Ring<kSm90WorkSlots> work_ring;
    uint32_t parity = 0;
    while (true) {
        const Sm90Work work = scheduler.work();
        publish<Config>(work, shared, work_ring);
        if (work.batch < 0) break;
        ptx::mbarrier_wait(&shared.work_wanted, parity);
        parity ^= 1;
        scheduler.request();
        scheduler.advance();
    }
    scheduler.finish();
}

// One warp: loads Q and K (over codes, Q alone) as far ahead of the consumers as the slots allow, across the
// ends of row tiles too. In the first CTA of a cluster it also hands out the work, if no other warp does.
template <class Config>
__device__ void run_q_k_loader(const AttentionParams& p, const Sm90Launch& plan, Sm90Shared<Config>& shared) {
    const bool leads = !Config::kOwnScheduler && (Config::kCtas == 1 || ptx::cluster_rank() == 0);
    Sm90Scheduler<Config> scheduler(p, plan);
    if (leads) scheduler.look_at_lengths();
    Ring<Config::kQSlots> q_ring;
    Ring<Config::kStages> ring;
    Ring<kSm90WorkSlots> work_ring;
    while (true) {
        Sm90Work work;
        if (leads) {
            work = scheduler.work();
            publish<Config>(work, shared, work_ring);
        } else {
            work = take_work<Config>(shared, work_ring);
        }
        if (work.batch < 0) break;
        if (leads) scheduler.request();
        if (Config::kOwnScheduler && ptx::elect_one()) ptx::mbarrier_arrive(&shared.work_wanted);

        if constexpr (Config::kHasCodes) {
            load_q<Config>(p, plan, work, shared, q_ring);
        } else {
            auto tiles = key_tiles<Config>(p, plan, work);
            const KeyLoader<Config> loader(p, plan, work);
            const int32_t last = tiles.last();
            int32_t pages = last >= 0 ? loader.find_pages(tiles.start(last)) : 0;
            for (int32_t i = last, next; i >= 0; i = next) {
                next = tiles.before(i);
                const int32_t next_pages = next >= 0 ? loader.find_pages(tiles.start(next)) : 0;
                ptx::mbarrier_wait(&shared.k_empty[ring.slot], ring.parity ^ 1);
                loader.template load<Config::kColumnBlocks>(plan.k, shared.k[ring.slot],
                                                            &shared.k_full[ring.slot], tiles.start(i), pages);
                ring.advance();
                if (i == last) load_q<Config>(p, plan, work, shared, q_ring);
                pages = next_pages;
            }
            if (last < 0) load_q<Config>(p, plan, work, shared, q_ring);
        }
        q_ring.advance();
        if (leads) scheduler.advance();
    }
    if (leads) scheduler.finish();
}

// One warp: loads V.
template <class Config>
__device__ void run_v_loader(const AttentionParams& p, const Sm90Launch& plan, Sm90Shared<Config>& shared) {
    Ring<Config::kVStages> ring;
    Ring<kSm90WorkSlots> work_ring;
    uint32_t patch_parities = 0;  // one bit per stage
    while (true) {
        const Sm90Work work = take_work<Config>(shared, work_ring);
        if (work.batch < 0) return;
        auto tiles = key_tiles<Config>(p, plan, work);
        const KeyLoader<Config> loader(p, plan, work);
        const int32_t last = tiles.last();
        int32_t pages = last >= 0 ? loader.find_pages(tiles.start(last)) : 0;
        for (int32_t i = last, next; i >= 0; i = next) {
            const int32_t first_key = tiles.start(i);
            next = tiles.before(i);
            const int32_t next_pages = next >= 0 ? loader.find_pages(tiles.start(next)) : 0;
            unsigned char* const tile = shared.v[ring.slot];
            uint64_t* const full = &shared.v_full[ring.slot];
            ptx::mbarrier_wait(&shared.v_empty[ring.slot], ring.parity ^ 1);
            if (loader.has_holes(first_key)) {
                loader.template load<Config::kValueBlocks>(plan.v, tile, &shared.patch[ring.slot], first_key,
                                                           pages);
                ptx::mbarrier_wait(&shared.patch[ring.slot], patch_parities >> ring.slot & 1);
                patch_parities ^= 1u << ring.slot;
                loader.template fill_holes<Config::kValueBlocks>(tile, first_key);
                if (ptx::elect_one()) ptx::mbarrier_arrive(full);
            } else {
                loader.template load<Config::kValueBlocks>(plan.v, tile, full, first_key, pages);
            }
            ring.advance();
            pages = next_pages;
        }
    }
}

// One of the producer's four warps, where keys are gathered: loads its rows of K and V as far ahead of the
// consumers as the slots allow, across the ends of row tiles too. Warp 0 also loads Q and sends results on
// their way, and warp 3 (kLeads) hands out the work.
//
// No wait for a slot lasts for ever: what consumers need before they free it is loaded before, by each warp.
// They free K once they had V of the tile before, and V, or the slot of a result, once they had K of the tile
// behind that V, which may be the first of the next row tile, if they are chained, with queries of its own,
// and the next work in any case. Here K of a tile comes before its V, that V before K two tiles behind, the
// queries right behind a row tile's first K, and the next work when all of these are under way.
template <class Config, bool kLeads>
__device__ void run_gatherer(const AttentionParams& p, const Sm90Launch& plan, Sm90Shared<Config>& shared,
                             int warp) {
    const bool loads_q = !kLeads && warp == 0;
    Sm90Scheduler<Config> scheduler(p, plan);
    if (kLeads) scheduler.look_at_lengths();
    Ring<Config::kQSlots> q_ring;
    Ring<Config::kStages> k_ring;
    Ring<Config::kVStages> v_ring;
    Ring<kSm90WorkSlots> work_ring;
    while (true) {
        Sm90Work work;
        if (kLeads) {
            work = scheduler.work();
            publish<Config>(work, shared, work_ring);
        } else {
            work = take_work<Config>(shared, work_ring);
        }
        if (work.batch < 0) break;
        if (kLeads) scheduler.request();

        auto tiles = key_tiles<Config>(p, plan, work);
        const KeyGatherer<Config> gatherer(p, plan, work, warp);
        const int32_t last = tiles.last();
        auto next_place = gatherer.find(last >= 0 ? tiles.start(last) : work.seqlen_k);
        for (int32_t i = last, next; i >= 0; i = next) {
            const auto place = next_place;
            next = tiles.before(i);
            if (next >= 0) next_place = gatherer.find(tiles.start(next));
            ptx::mbarrier_wait(&shared.k_empty[k_ring.slot], k_ring.parity ^ 1);
            gatherer.gather_keys(shared.k[k_ring.slot], &shared.k_full[k_ring.slot], place);
            k_ring.advance();
            if (i == last && loads_q) load_q<Config>(p, plan, work, shared, q_ring);
            ptx::mbarrier_wait(&shared.v_empty[v_ring.slot], v_ring.parity ^ 1);
            gatherer.gather_values(shared.v[v_ring.slot], &shared.v_full[v_ring.slot], place);
            v_ring.advance();
        }
        if (last < 0 && loads_q) load_q<Config>(p, plan, work, shared, q_ring);
        q_ring.advance();
        if (kLeads) scheduler.advance();
    }
    if (kLeads) scheduler.finish();
    for (int slot = 0; loads_q && slot < Config::kQSlots; ++slot) {
        for (int group = 0; group < Config::kConsumers; ++group)
            send_earlier_result(plan, shared, q_ring, group);
        q_ring.advance();
    }
}

// One warp: sends the consumers' results on their way, so that none waits for a store.
template <class Config>
__device__ void run_storer(const AttentionParams& p, const Sm90Launch& plan, Sm90Shared<Config>& shared) {
    Ring<Config::kQSlots> q_ring;
    Ring<kSm90WorkSlots> work_ring;
    while (true) {
        const Sm90Work work = take_work<Config>(shared, work_ring);
        if (work.batch < 0) return;
        for (int group = 0; group < Config::kConsumers; ++group) {
            ptx::mbarrier_wait(&shared.out_full[q_ring.slot][group], q_ring.parity);
            if (ptx::elect_one()) {
                const QueryPlace at(p, plan, work, tile_block<Config>(group), p.out_batch_stride);
                const bool any = at.any && (!Config::kSplits || shared.complete[q_ring.slot][group]);
                send_result(plan, shared, q_ring.slot, group, any, at);
                ptx::mbarrier_arrive(&shared.q_empty[q_ring.slot][group]);
            }
            __syncwarp();
        }
        q_ring.advance();
    }
}

}  // namespace octavo::cuda
