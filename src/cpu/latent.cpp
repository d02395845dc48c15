// latent_attention on the CPU. The keys of a row are cut into runs that depend on its sequence alone, so that
// its bits do not depend on the rest of the batch.
#include "common/online_softmax.h"
#include "cpu/backend.h"
#include "cpu/kernels.h"
#include "cpu/thread_pool.h"

#include <algorithm>
#include <atomic>
#include <memory>
#include <mutex>
#include <vector>

namespace octavo::cpu {
namespace {

constexpr int32_t kRunKeys = 1024;  // of one run, where the caller does not say how many runs

LatentScratch& thread_scratch() {
    thread_local std::unique_ptr<LatentScratch> scratch = std::make_unique<LatentScratch>();
    return *scratch;
}

// One tile of rows with all of its runs of keys, whose results wait for the last of them.
struct TileWork {
    LatentTile tile;
    int32_t num_runs;
    int64_t first_item;
    std::once_flag begun;
    std::unique_ptr<float[]> partials;
    std::atomic<int32_t> num_finished{0};

    TileWork(const LatentTile& tile, int32_t num_runs, int64_t first_item)
        : tile(tile), num_runs(num_runs), first_item(first_item) {}

    // The place of a run's result.
    Partial partial(const LatentAttentionParams& p, int64_t run) {
        const int64_t out_size = int64_t{tile.num_rows} * row_stride(p.v_dim);
        const int64_t size = out_size + tile.num_rows;
        std::call_once(begun, [&] { partials.reset(new float[num_runs * size]); });
        float* const out = &partials[run * size];
        return {out, out + out_size};
    }
};

void merge(const LatentAttentionParams& p, const LatentTile& tile, Partial into, Partial other) {
    const int stride = row_stride(p.v_dim);
    for (int r = 0; r < tile.num_rows; ++r) {
        const MergeWeights weights = MergeWeights::make(into.lse[r], other.lse[r]);
        float* const a = into.out + r * stride;
        const float* const b = other.out + r * stride;
        for (int d = 0; d < p.v_dim; ++d) a[d] = weights.a * a[d] + weights.b * b[d];
        into.lse[r] = weights.lse;
    }
}

}  // namespace

void latent_attention(const LatentAttentionParams& p) {
    const LatentKernels& kernels = octavo::cpu::kernels().latent;
    std::vector<std::unique_ptr<TileWork>> work;
    int64_t num_items = 0;
    for (int32_t b = 0; b < p.batch; ++b) {
        const LatentSequence sequence = LatentSequence::make(p, b);
        const int32_t num_rows = sequence.seqlen_q * p.num_q_heads;
        const int32_t blocks = (sequence.seqlen_k + kLatentKeys - 1) / kLatentKeys;
        const int32_t wanted = p.num_splits ? p.num_splits : (sequence.seqlen_k + kRunKeys - 1) / kRunKeys;
        const int32_t num_runs = std::clamp(wanted, 1, std::max(1, blocks));
        for (int32_t row = 0; row < num_rows; row += kLatentRows) {
            const LatentTile tile{sequence, b, row, std::min(kLatentRows, num_rows - row)};
            work.push_back(std::make_unique<TileWork>(tile, num_runs, num_items));
            num_items += num_runs;
        }
    }
    parallel_for(num_items, [&](int64_t item) {
        TileWork& mine = **std::prev(std::upper_bound(
            work.begin(), work.end(), item,
            [](int64_t i, const std::unique_ptr<TileWork>& tile) { return i < tile->first_item; }));
        const LatentTile& tile = mine.tile;
        const int64_t run = item - mine.first_item;
        const int64_t blocks = (tile.sequence.seqlen_k + kLatentKeys - 1) / kLatentKeys;
        kernels.attend(p, tile, static_cast<int32_t>(blocks * run / mine.num_runs * kLatentKeys),
                       static_cast<int32_t>(blocks * (run + 1) / mine.num_runs * kLatentKeys),
                       thread_scratch(), mine.partial(p, run));
        if (mine.num_finished.fetch_add(1, std::memory_order_acq_rel) + 1 < mine.num_runs) return;
        const Partial all = mine.partial(p, 0);
        for (int32_t other = 1; other < mine.num_runs; ++other) merge(p, tile, all, mine.partial(p, other));
        kernels.store(p, tile, all);
        mine.partials.reset();
    });
}

}  // namespace octavo::cpu
