#include "cuda/latent/plan.h"

#include "common/fail.h"
#include "cuda/alignment.h"
#include "cuda/backend.h"

#include <algorithm>
#include <iterator>

namespace octavo::cuda {
namespace {

// How many CTAs combine the results of their splits before they write them: two of sm90_latent, if there are
// no more. Halving the partial results of more splits saves less time than a cluster takes.
int32_t cluster_of(bool is_sm90, int64_t num_splits) { return is_sm90 && num_splits == 2 ? 2 : 1; }

// Returns the number of splits with the least time. An SM holds one CTA, so that CTAs run in waves. A CTA
// takes the time of its tiles of keys and of about two more. Combining takes the time of one tile, and of
// another one for every 32 partial results; within a cluster that of half a tile.
int32_t choose_num_splits(int64_t num_row_tiles, int64_t key_tiles, int32_t num_sms, bool is_sm90) {
    constexpr int64_t kBegin = 2 * 32, kMaxSplits = 128;
    int64_t best = 1, least = 0;
    for (int64_t splits = 1; splits <= std::min(kMaxSplits, std::max<int64_t>(key_tiles, 1)); ++splits) {
        const int64_t waves = ceil_divide(num_row_tiles * splits, num_sms);
        const int64_t cluster = cluster_of(is_sm90, splits), partials = splits / cluster;
        const int64_t combine = (partials > 1 ? 32 + partials : 0) + (cluster > 1 ? 16 : 0);
        const int64_t time = waves * (ceil_divide(key_tiles, splits) * 32 + kBegin) + combine;
        if (splits > 1 && time >= least) continue;
        best = splits;
        least = time;
    }
    return static_cast<int32_t>(best);
}

// The most tiles of keys that a schedule may have to share out. A sequence without keys has one.
int64_t scheduled_tiles(const LatentAttentionParams& p, int32_t tile_keys) {
    return p.batch * std::max<int64_t>(ceil_divide(p.seqlen_k, tile_keys), 1);
}

// Whether there can be a schedule. It cuts sequences where its runs end, and so not into a number of splits
// that a caller asks for.
bool can_schedule(const LatentAttentionParams& p, int32_t tile_keys) {
    // A schedule counts more for each sequence than its tiles.
    constexpr int64_t kMost = (int64_t{1} << 31) - kSm90LatentCost * kMaxLatentScheduleBatch;
    return p.num_splits == 0 && p.batch <= kMaxLatentScheduleBatch && scheduled_tiles(p, tile_keys) < kMost;
}

// Whether sm90_latent can have a schedule. A run has a CTA for each tile of rows that a sequence may have,
// which idles where a sequence has fewer.
bool can_schedule_sm90(const LatentAttentionParams& p, const LatentPlan& plan, const Gpu& gpu) {
    const bool are_full = int64_t{8} * p.total_q >= int64_t{7} * p.batch * p.seqlen_q;
    return can_schedule(p, kSm90LatentPairKeys) && plan.tiles_per_sequence <= gpu.num_sms / 4 &&
           (are_full || plan.tiles_per_sequence == 1);
}

// The number of runs, for each of which there is an SM for every tile of rows.
int32_t num_runs(const LatentAttentionParams& p, const LatentPlan& plan, const Gpu& gpu, int32_t min_keys) {
    const int64_t most = ceil_divide(scheduled_tiles(p, plan.keys()) * plan.keys(), min_keys);
    return static_cast<int32_t>(
        std::min<int64_t>(gpu.num_sms / plan.tiles_per_sequence, std::max<int64_t>(most, p.batch)));
}

// Whether the copy engine can copy tiles of the pages, and brings enough keys at a time to be faster than
// threads.
bool are_boxes(const LatentAttentionParams& p) {
    constexpr int64_t kMostStride = int64_t{1} << 39;  // it takes no larger stride, in elements
    return (p.page_size % kSm90LatentKeys == 0 || p.page_size == kSm90LatentKeys / 2) && p.num_pages > 0 &&
           p.kv_slot_stride > 0 && (p.num_pages == 1 || p.kv_page_stride > 0) &&
           p.kv_slot_stride < kMostStride && p.kv_page_stride < kMostStride;
}

// Whether sm90_latent serves the call. It scales scores after it has masked them and found their maximum, so
// the scale has to be positive.
bool serves_sm90(const LatentAttentionParams& p, const LatentPlan& plan, const Gpu& gpu) {
    return gpu.has_sm90_kernels && plan.q_aligned && plan.kv_aligned && p.softmax_scale > 0.0f &&
           aligned(p.out, 16, {p.out_token_stride, p.out_head_stride}, p.dtype);
}

// Whether latent_decode can serve the call, which needs all rows of a sequence in one tile, and pages: it
// copies zeros from the first one where a sequence has no keys.
bool can_decode(const LatentAttentionParams& p, const LatentPlan& plan, const Gpu& gpu) {
    return gpu.has_sm90_kernels && plan.q_aligned && plan.kv_aligned && p.num_pages > 0 &&
           int64_t{p.seqlen_q} * p.num_q_heads <= kLatentRows &&
           can_schedule(p, latent_decode_keys(plan.is_fp8())) &&
           aligned(p.out, 4, {p.out_token_stride, p.out_head_stride}, p.dtype);
}

// Whether sequences are known to have different lengths: unless they share pages, their mean length is at
// most 9/10 of what the page table has room for.
bool lengths_differ(const LatentAttentionParams& p) {
    return int64_t{9} * p.batch * p.seqlen_k >= int64_t{10} * p.num_pages * p.page_size;
}

// Whether latent_decode is likely the fastest. With few sequences too many of its CTAs share each of them.
// Over 16 bits sm90_latent is as fast or faster where all sequences are alike and the copy engine brings
// the keys.
bool decodes_fastest(const LatentAttentionParams& p, const LatentPlan& plan, bool sm90_serves) {
    if (p.batch < 16) return false;
    if (plan.is_fp8() || plan.gathers || !sm90_serves) return true;
    return p.batch >= 32 && lengths_differ(p);
}

// Whether a schedule is likely faster for sm90_latent than the splits of the plan, which give all sequences
// as many CTAs. Where sequences are alike, one split is faster if it leaves few SMs idle, and so is a cluster
// of two whose CTAs all run at once.
bool schedules_fastest(const LatentAttentionParams& p, const LatentPlan& plan, const Gpu& gpu) {
    constexpr int64_t kMaxRuns = 9;  // of a sequence; combining what more of them leave takes too long
    const int64_t row_tiles = plan.num_row_tiles();
    if (kMaxRuns * row_tiles < gpu.num_sms || p.seqlen_k < 4 * kSm90LatentKeys) return false;
    const int64_t ctas = row_tiles * plan.num_splits, waves = ceil_divide(ctas, gpu.num_sms);
    return lengths_differ(p) || plan.num_partials() > 1 || (waves > 1 && plan.num_splits > 1) ||
           8 * ctas < 7 * waves * gpu.num_sms;
}

std::string name_of(DType dtype, bool is_fp8, const LatentTiles& tiles) {
    return text_of("latent_attention<", to_string(dtype), is_fp8 ? " over float8_e4m3fn" : "", ", ",
                   tiles.keys, " keys, ", tiles.stages, " stages>");
}

std::string sm90_name_of(DType dtype, Sm90LatentCache cache, bool is_scheduled) {
    const char* const over = cache == Sm90LatentCache::fp8        ? " over float8_e4m3fn"
                             : cache == Sm90LatentCache::gathered ? " over small pages"
                                                                  : "";
    return text_of("sm90_latent_attention<", to_string(dtype), over, ", ",
                   is_scheduled ? "schedule" : "splits", ">");
}

std::string decode_name_of(DType dtype, bool is_fp8) {
    return text_of("latent_decode<", to_string(dtype), is_fp8 ? " over float8_e4m3fn" : "", ">");
}

}  // namespace

LatentPlan plan_latent_attention(const LatentAttentionParams& p, const Gpu& gpu) {
    LatentPlan plan{};
    plan.dtype = p.dtype;
    plan.kv_dtype = p.kv_dtype;
    while (plan.row + 1 < static_cast<int32_t>(std::size(kLatentTiles)) &&
           plan.tiles().shared_bytes(plan.is_fp8()) > gpu.shared_bytes_per_block)
        ++plan.row;
    plan.q_aligned = aligned(p.q, 16, {p.q_token_stride, p.q_head_stride}, p.dtype);
    plan.kv_aligned = aligned(p.kv, 16, {p.kv_page_stride, p.kv_slot_stride}, p.kv_dtype);
    plan.gathers = !plan.is_fp8() && !are_boxes(p);
    const bool sm90_serves = serves_sm90(p, plan, gpu);
    if (can_decode(p, plan, gpu) && decodes_fastest(p, plan, sm90_serves))
        plan.kernel = LatentKernel::latent_decode;
    else if (sm90_serves)
        plan.kernel = LatentKernel::sm90_latent;
    plan.num_sequences = p.total_q == 0 ? 0 : p.batch;
    plan.num_q_heads = p.num_q_heads;
    plan.total_rows = p.total_q * p.num_q_heads;
    plan.tiles_per_sequence =
        static_cast<int32_t>(ceil_divide(int64_t{p.seqlen_q} * p.num_q_heads, plan.rows()));
    const bool is_sm90 = plan.kernel == LatentKernel::sm90_latent;
    plan.gathers = plan.gathers && is_sm90;
    plan.cluster = 1;
    if (plan.kernel != LatentKernel::latent_decode) {
        plan.num_splits = p.num_splits > 0
                              ? p.num_splits
                              : choose_num_splits(plan.num_row_tiles(), ceil_divide(p.seqlen_k, plan.keys()),
                                                  gpu.num_sms, is_sm90);
        plan.cluster = cluster_of(is_sm90, plan.num_splits);
    }
    if (plan.kernel == LatentKernel::latent_decode ||
        (is_sm90 && can_schedule_sm90(p, plan, gpu) && schedules_fastest(p, plan, gpu))) {
        plan.num_splits = 0;
        plan.cluster = 1;
        if (plan.num_row_tiles() > 0)
            plan.num_ctas = num_runs(p, plan, gpu, is_sm90 ? kSm90LatentMinKeys : kLatentDecodeMinKeys) *
                            plan.tiles_per_sequence;
    }
    constexpr int64_t kMaxGridX = (int64_t{1} << 31) - 1;
    if (std::max(plan.grid().x, plan.total_rows) > kMaxGridX) {
        fail<ValueError>("latent_attention", "the batch has ", plan.total_rows, " rows in ",
                         plan.num_row_tiles(), " tiles; one launch takes at most ", kMaxGridX, " of either");
    }
    return plan;
}

Explanation describe(const LatentPlan& plan) {
    Explanation text;
    switch (plan.kernel) {
        case LatentKernel::latent:
            text.file = "src/cuda/latent/kernel.cuh";
            text.kernel = name_of(plan.dtype, plan.is_fp8(), plan.tiles());
            break;
        case LatentKernel::sm90_latent:
            text.file = "src/cuda/sm90_latent/kernel.cuh";
            text.kernel = sm90_name_of(plan.dtype, plan.cache(), plan.is_scheduled());
            break;
        case LatentKernel::latent_decode:
            text.file = "src/cuda/latent_decode/kernel.cuh";
            text.kernel = decode_name_of(plan.dtype, plan.is_fp8());
            break;
    }
    const std::string ctas = text_of(counted(plan.grid().size(), "CTA"), " of ", plan.threads(), " threads");
    if (plan.is_scheduled()) {
        text.summary = text_of(counted(plan.num_sequences, "sequence"), " of up to ",
                               counted(plan.tiles_per_sequence, "tile"), " of ", plan.rows(),
                               " rows, in equal runs of keys: ", ctas);
    } else {
        text.summary = text_of(counted(plan.num_row_tiles(), "tile"), " of ", plan.rows(), " rows x ",
                               counted(plan.num_splits, "split"), ": ", ctas);
    }
    if (plan.has_slots()) text.summary += "; then combine_sm90_latent_kernel";
    if (plan.num_partials() > 1) text.summary += "; then combine_latent_kernel";
    text.plan = {
        {"dtype", to_string(plan.dtype)},
        {"kv_dtype", to_string(plan.kv_dtype)},
        {"rows", int64_t{plan.rows()}},
        {"keys", int64_t{plan.keys()}},
        {"stages", int64_t{plan.stages()}},
        {"num_sequences", int64_t{plan.num_sequences}},
        {"num_q_heads", int64_t{plan.num_q_heads}},
        {"num_row_tiles", plan.num_row_tiles()},
        {"num_splits", int64_t{plan.num_splits}},
        {"cluster", int64_t{plan.cluster}},
        {"q_aligned", plan.q_aligned},
        {"kv_aligned", plan.kv_aligned},
        {"gathers", plan.gathers},
        {"num_ctas", plan.grid().size()},
        {"threads", int64_t{plan.threads()}},
        {"shared_bytes", plan.shared_bytes()},
        {"workspace_bytes", plan.workspace_bytes() + 4 * plan.workspace_words()},
    };
    return text;
}

Explanation explain(const LatentAttentionParams& p, const Gpu& gpu) {
    return describe(plan_latent_attention(p, gpu));
}

std::vector<std::string> latent_attention_instances() {
    std::vector<std::string> names;
    for (DType dtype : kAttentionTypes) {
        for (auto cache : {Sm90LatentCache::numbers, Sm90LatentCache::gathered, Sm90LatentCache::fp8}) {
            for (bool is_scheduled : {false, true}) names.push_back(sm90_name_of(dtype, cache, is_scheduled));
        }
        for (bool is_fp8 : {false, true}) {
            names.push_back(decode_name_of(dtype, is_fp8));
            for (const LatentTiles& tiles : kLatentTiles) {
                names.push_back(name_of(dtype, is_fp8, tiles));
            }
        }
    }
    return names;
}

}  // namespace octavo::cuda
