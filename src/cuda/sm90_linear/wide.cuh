// sm90_wide: rows of x times weights by wgmma, with x on its side of 64 rows and the weights on the other. A
// tile has as many rows of w as bring the number of tiles near the number of SMs (as DeepGEMM picks them).
// Page: docs/kernels/linear.md.
//
// grid: CTAs x splits; the splits of a tile are a cluster. A CTA owns every num_ctas-th tile, or a split of a
// single tile where K is split. One thread copies through the ring; a warpgroup multiplies up to 64 rows of
// x. Fewer rows of x than 64 are not padded: wgmma reads on into the weights behind them, and the sums of
// those rows are dropped.
#pragma once

#include "cuda/linear/output.cuh"
#include "cuda/ptx/cluster.h"
#include "cuda/ptx/warpgroup.h"
#include "cuda/ptx/wgmma.h"
#include "cuda/sm90_linear/operand_copy.cuh"

namespace octavo::cuda {

template <int kWRows_, int kXRows_>
struct WideConfig {
    static constexpr int kWRows = kWRows_, kXRows = kXRows_;
    static constexpr int kMinCtas = wide_fits_twice(kWRows, kXRows) ? 2 : 1;
    static constexpr int kWarpgroups = wide_warpgroups(kXRows);
    static constexpr int kConsumers = 128 * kWarpgroups, kThreads = kConsumers + 32;
    // A thread has the sums of groups of eight rows of w. Each group is sent or kept together with the group
    // half a tile behind it: with a gate, the result needs both.
    static constexpr int kGroups = kWRows / 8, kPairs = kGroups / 2;
};

// This is not inlined, since a thread writes up to 128 pairs.
template <class T>
__device__ __noinline__ void write_pair_of_many(const LinearOutput& p, int32_t row, int32_t column,
                                                int32_t end, float2 gate, float2 up) {
    write_pair<T>(p, row, column, end, gate, up);
}

template <class T, class Config>
class WideProducts {
  public:
    __device__ __forceinline__ void clear() {
#pragma unroll
        for (float& sum : sums_) sum = 0.0f;
    }

    // `stage`: the stage's address in the shared window.
    __device__ __forceinline__ void multiply(uint32_t stage, int32_t panels, int warpgroup) {
        ptx::wgmma_results(sums_);
#pragma unroll 1
        for (int panel = 0; panel < panels; ++panel) {
            const uint32_t x_address = stage + panel * Config::kXRows * 128 + warpgroup * 64 * 128;
            const uint32_t w_address = stage + (panels * Config::kXRows + panel * Config::kWRows) * 128;
            const uint64_t x = ptx::wgmma_descriptor(x_address, 16);
            const uint64_t w = ptx::wgmma_descriptor(w_address, 16);
            ptx::wgmma_fence();
#pragma unroll
            for (int i = 0; i < kPanelColumns / 16; ++i)
                ptx::Wgmma<T, Config::kWRows>::ss(sums_, x + (32 * i >> 4), w + (32 * i >> 4), true);
            ptx::wgmma_commit();
        }
        ptx::wgmma_wait<0>();
        ptx::wgmma_results(sums_);
    }

    // Adds up the sums of the cluster, in the order of its ranks. This CTA then has the totals of every
    // splits-th pair of groups.
    __device__ __forceinline__ void add_cluster(const Sm90LinearLaunch& p, int32_t rank) {
        const int32_t log2_splits = __ffs(p.splits) - 1;
        const int32_t shares = (Config::kPairs + p.splits - 1) >> log2_splits;  // the most pairs of a CTA
        auto* const landed =
            reinterpret_cast<float4*>(linear_stages() + p.stages * p.stage_bytes) + threadIdx.x;
        // The place for the sums of a group that one CTA sends to another.
        auto slot = [&](int32_t from, int32_t to, int group) {
            const int32_t of_pair = (from - (from > to)) * shares + (group % Config::kPairs >> log2_splits);
            return (2 * of_pair + group / Config::kPairs) * Config::kConsumers;
        };
        ptx::cluster_wait();  // the other CTAs have initialised their barriers
#pragma unroll
        for (int group = 0; group < Config::kGroups; ++group) {
            const int32_t owner = group % Config::kPairs & (p.splits - 1);
            if (owner == rank) continue;
            const float* const d = sums_ + 4 * group;
            ptx::store_cluster_async(
                ptx::cluster_address(ptx::shared_address(landed + slot(rank, owner, group)), owner),
                {__float_as_int(d[0]), __float_as_int(d[1]), __float_as_int(d[2]), __float_as_int(d[3])},
                ptx::cluster_address(ptx::shared_address(&linear_barriers().landed), owner));
        }
        if (rank >= Config::kPairs) return;
        ptx::mbarrier_wait(&linear_barriers().landed, 0);
#pragma unroll
        for (int group = 0; group < Config::kGroups; ++group) {
            if ((group % Config::kPairs & (p.splits - 1)) != rank) continue;
            float* const d = sums_ + 4 * group;
            float4 total{};
#pragma unroll 1
            for (int32_t from = 0; from < p.splits; ++from) {
                const float4 part =
                    from == rank ? float4{d[0], d[1], d[2], d[3]} : landed[slot(from, rank, group)];
                total.x += part.x, total.y += part.y, total.z += part.z, total.w += part.w;
            }
            d[0] = total.x, d[1] = total.y, d[2] = total.z, d[3] = total.w;
        }
    }

    // Writes the sums of this CTA's pairs of groups to the result.
    __device__ __forceinline__ void write(const Sm90LinearLaunch& p, int32_t tile, int32_t rank) const {
        const int lane = threadIdx.x % 32;
        const int32_t first_column = p.first_column(tile / p.x_tiles), column = first_column + lane % 4 * 2;
        const int32_t end = min(p.first_column(tile / p.x_tiles + 1), p.output.width);
        // How many groups can be written without a test of each element; 0 if not all of them can.
        const int32_t whole_groups =
            p.output.in_pairs && !p.output.bias && p.output.width % 8 == 0 ? (end - first_column) / 8 : 0;
        auto is_own = [&](int pair) { return p.splits == 1 || (pair & (p.splits - 1)) == rank; };
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int32_t x_row = static_cast<int32_t>(threadIdx.x) / 32 * 16 + lane / 4 + 8 * half;
            const int32_t row = tile % p.x_tiles * Config::kXRows + x_row;
            if (x_row >= Config::kXRows || row >= p.output.num_rows) continue;
            auto sums = [&](int group) {
                return float2{sums_[4 * group + 2 * half], sums_[4 * group + 2 * half + 1]};
            };
            T* const out = static_cast<T*>(p.output.out) + row * p.output.out_stride + column;
            auto pair_of = [](T* at) -> uint32_t& { return *reinterpret_cast<uint32_t*>(at); };
            if (whole_groups > 0 && p.output.is_plain()) {
#pragma unroll
                for (int group = 0; group < Config::kGroups; ++group) {
                    if (!is_own(group % Config::kPairs) || group >= whole_groups) continue;
                    const float2 sum = sums(group);
                    pair_of(out + 8 * group) = pack<T>(sum.x, sum.y);
                }
            } else if (whole_groups > 0 && p.output.is_gate_alone()) {
#pragma unroll
                for (int pair = 0; pair < Config::kPairs; ++pair) {
                    if (!is_own(pair) || pair >= whole_groups) continue;
                    const float2 gate = sums(pair), up = sums(pair + Config::kPairs);
                    pair_of(out + 8 * pair) =
                        pack<T>(activation::silu(gate.x) * up.x, activation::silu(gate.y) * up.y);
                }
            } else if (whole_groups > 0 && p.output.is_residual_alone()) {
                const T* const residual =
                    static_cast<const T*>(p.output.residual) + row * p.output.residual_stride + column;
                constexpr int kAtOnce = 8;  // more would take too many registers
#pragma unroll
                for (int first = 0; first < Config::kGroups; first += kAtOnce) {
                    float2 added[kAtOnce];
#pragma unroll
                    for (int i = 0; i < kAtOnce; ++i) {
                        const int group = first + i;
                        if (group < whole_groups && is_own(group % Config::kPairs))
                            added[i] = unpack<T>(*reinterpret_cast<const uint32_t*>(residual + 8 * group));
                    }
#pragma unroll
                    for (int i = 0; i < kAtOnce; ++i) {
                        const int group = first + i;
                        if (group >= Config::kGroups || group >= whole_groups) continue;
                        if (!is_own(group % Config::kPairs)) continue;
                        const float2 sum = sums(group);
                        pair_of(out + 8 * group) = pack<T>(sum.x + added[i].x, sum.y + added[i].y);
                    }
                }
            } else {
#pragma unroll
                for (int pair = 0; pair < Config::kPairs; ++pair) {
                    if (!is_own(pair)) continue;
                    const float2 first = sums(pair), second = sums(pair + Config::kPairs);
                    if (p.output.is_gated()) {
                        write_pair_of_many<T>(p.output, row, column + 8 * pair, end, first, second);
                    } else {
                        write_pair_of_many<T>(p.output, row, column + 8 * pair, end, first, {});
                        write_pair_of_many<T>(p.output, row, column + 8 * (pair + Config::kPairs), end,
                                              second, {});
                    }
                }
            }
        }
    }

  private:
    float sums_[Config::kWRows / 2];
};

template <class T, class Config>
__global__ void __launch_bounds__(Config::kThreads, Config::kMinCtas)
    sm90_wide_kernel(const __grid_constant__ Sm90LinearLaunch p) {
    const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0);
    const auto rank = static_cast<int32_t>(p.splits > 1 ? ptx::cluster_rank() : 0);
    const int32_t first_tile = static_cast<int32_t>(blockIdx.x) / p.splits;
    const int32_t num_ctas = static_cast<int32_t>(gridDim.x) / p.splits;
    const StepRange range(p, rank);
    if (threadIdx.x == 0) {
        const int32_t own = max((Config::kPairs - rank + p.splits - 1) / p.splits, 0);
        init_linear_barriers(p, Config::kConsumers / 32,
                             own * (p.splits - 1) * 2 * Config::kConsumers * sizeof(float4));
    }
    __syncthreads();
    if (p.splits > 1) ptx::cluster_arrive_relaxed();
    if (warp == Config::kConsumers / 32) {
        if (ptx::elect_one())
            OperandCopy<Config::kWRows, Config::kXRows>(p, range, first_tile, num_ctas).run();
        __syncwarp();
        if (p.splits > 1) ptx::cluster_wait();
        return;
    }
    WideProducts<T, Config> products;
    RingPosition at;
    for (int32_t tile = first_tile; tile < p.num_tiles; tile += num_ctas) {
        products.clear();
        for (int32_t step = range.begin; step < range.end; ++step) {
            ptx::mbarrier_wait(&linear_barriers().full[at.stage], at.parity);
            products.multiply(ptx::shared_address(linear_stages() + at.stage * p.stage_bytes), p.panels,
                              warp / 4);
            if (threadIdx.x % 32 == 0) ptx::mbarrier_arrive(&linear_barriers().empty[at.stage]);
            at.advance(p.stages);
        }
        if (p.splits > 1) products.add_cluster(p, rank);
        ptx::wait_for_previous_grid();  // `residual` may be its result
        products.write(p, tile, rank);
    }
}

}  // namespace octavo::cuda
