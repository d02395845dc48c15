#include "cuda/decode/plan.h"

#include "cuda/alignment.h"
#include "cuda/decode/fixed_splits.h"

#include <algorithm>
#include <array>
#include <initializer_list>
#include <iterator>
#include <utility>

namespace octavo::cuda {
namespace {

// What is known of one configuration of the split-KV kernel.
struct SplitKvShape {
    int32_t warps;
    int32_t block_bytes;  // of keys and values
    int32_t row_words;    // of a row's partial result
    int32_t (*splits_of)(int32_t blocks);

    template <class Config>
    static constexpr SplitKvShape of() {
        return {Config::kWarps, 16 * Config::kBlockChunks, Config::kPartialRow, Config::parts_of};
    }
};

template <class Config>
int32_t most_fixed_splits(int32_t max_log2, int64_t blocks) {
    return FixedSplits<Config>(max_log2).most(blocks);
}

// What is known of the kernels of one row of kDecodeTiles.
struct DecodeShape {
    SplitKvShape long_items, short_items, many_items, by_length;
    bool has_short_items;                  // under SplitPolicy::even; or many_items serves short items too
    int32_t short_keys, short_fixed_keys;  // that a short item has at most; likewise, batch-invariant
    int32_t (*max_fixed_splits_log2)(int32_t num_kv_heads);
    int32_t (*most_fixed_splits)(int32_t max_log2, int64_t blocks);
    int32_t stream_k_threads, stream_k_rows, stream_k_row_words;
    int32_t batch_invariant_threads, batch_invariant_row_words, batch_invariant_min_blocks;

    template <int kHeadDim, int kRowTiles>
    static constexpr DecodeShape of() {
        using Long = SplitKvConfig<kHeadDim, kRowTiles, 1>;
        using Many = ManyConfig<kHeadDim, kRowTiles>;
        using StreamK = StreamKConfig<kHeadDim, kRowTiles>;
        using BatchInvariant = DecodeConfig<kHeadDim, kRowTiles>;
        return {SplitKvShape::of<Long>(),
                SplitKvShape::of<ShortConfig<kHeadDim, kRowTiles>>(),
                SplitKvShape::of<Many>(),
                SplitKvShape::of<ByLengthConfig<kHeadDim, kRowTiles>>(),
                cuda::has_short_items<kHeadDim, kRowTiles>(),
                Long::kShortKeys,
                FixedSplits<Long>::kShortBlocks * kBlockKeys,
                FixedSplits<Long>::max_log2,
                cuda::most_fixed_splits<Long>,
                StreamK::kThreads,
                StreamK::kRows,
                StreamK::kWarpPartialRow,
                BatchInvariant::kThreads,
                BatchInvariant::kWarpPartialRow,
                BatchInvariant::kMinBlocks};
    }
};

template <size_t... kRows>
constexpr std::array<DecodeShape, sizeof...(kRows)> shapes(std::index_sequence<kRows...>) {
    return {DecodeShape::of<kDecodeTiles[kRows].head_dim, kDecodeTiles[kRows].row_tiles>()...};
}
constexpr auto kShapes = shapes(std::make_index_sequence<std::size(kDecodeTiles)>());

struct Axis {
    int64_t length, stride;
};

// Whether the kernels' 32-bit offsets, which count 16 bytes, reach every row.
bool is_within_reach(DType dtype, std::initializer_list<Axis> axes) {
    int64_t last = 0;
    for (const Axis& axis : axes) {
        if (axis.length > 1 && axis.stride < 0) return false;
        last += std::max(axis.length - 1, int64_t{0}) * axis.stride;
    }
    return last / (16 / size_of(dtype)) < (int64_t{1} << 32);
}

bool is_within_reach(const AttentionParams& p, int64_t outer_stride, int64_t token_stride,
                     int64_t head_stride) {
    return is_within_reach(
        p.dtype, {{p.num_pages, outer_stride}, {p.page_size, token_stride}, {p.num_kv_heads, head_stride}});
}

// How many sequences a launch takes, whose blocks it counts in 32 bits.
int32_t count_sequences(const AttentionParams& p) {
    constexpr int64_t kMaxBlocks = (int64_t{1} << 30) - 1;
    const int64_t blocks = (int64_t{p.seqlen_k} / kBlockKeys + 1) * p.num_kv_heads;
    return static_cast<int32_t>(
        std::min<int64_t>({kMaxBlocks / blocks, int64_t{kMaxDecodeBatch}, int64_t{p.batch}}));
}

// The smallest row of kDecodeTiles that holds the problem, if the decode kernels can serve it.
std::optional<int32_t> choose_tiles(const AttentionParams& p, const Gpu& gpu, std::string* why_not) {
    if (!p.paged()) return refuse(why_not, "it reads keys and values from pages, and these lie in arrays");
    if (p.num_splits != 0) {
        return refuse(why_not, "num_splits (", p.num_splits,
                      ") is given, and this kernel chooses its splits by itself");
    }
    const int64_t rows = int64_t{p.seqlen_q} * p.group_size();
    int32_t row = 0, most_rows = 0;
    for (; row < static_cast<int32_t>(std::size(kDecodeTiles)); ++row) {
        if (kDecodeTiles[row].head_dim < p.head_dim) continue;
        most_rows = std::max(most_rows, kDecodeTiles[row].rows());
        if (kDecodeTiles[row].rows() >= rows) break;
    }
    if (row == static_cast<int32_t>(std::size(kDecodeTiles))) {
        return refuse(why_not, "it takes at most ", most_rows, " rows a KV head for head_dim ", p.head_dim,
                      ", and these are ", rows, ": ", counted(p.seqlen_q, "query token"), " of ",
                      counted(p.group_size(), "query head"));
    }
    if (gpu.shared_bytes_per_block < static_cast<int64_t>(kDecodeSharedBytes)) {
        return refuse(why_not, "it takes up to ", kDecodeSharedBytes / 1024,
                      " KB of shared memory, and this GPU has ", gpu.shared_bytes_per_block / 1024,
                      " KB for a block");
    }
    if (count_sequences(p) == 0 || p.num_kv_heads > (1 << 16)) {
        return refuse(why_not, "it counts blocks of 16 keys in 32 bits, and a sequence may have ", p.seqlen_k,
                      " keys of ", p.num_kv_heads, " heads");
    }
    const int64_t q_length = p.cu_seqlens_q ? p.total_q : p.seqlen_q;
    if (!is_within_reach(p, p.k_outer_stride, p.k_token_stride, p.k_head_stride) ||
        !is_within_reach(p, p.v_outer_stride, p.v_token_stride, p.v_head_stride) ||
        !is_within_reach(p.dtype, {{p.batch, p.cu_seqlens_q ? 0 : p.q_batch_stride},
                                   {q_length, p.q_token_stride},
                                   {p.num_q_heads, p.q_head_stride}})) {
        return refuse(why_not,
                      "its offsets reach the 64 GB behind an array's first element, and q, k_pages "
                      "or v_pages has elements beyond");
    }
    if (!aligned(p.q, 16, {p.q_batch_stride, p.q_token_stride, p.q_head_stride}, p.dtype) ||
        !aligned(p.k, 16, {p.k_outer_stride, p.k_token_stride, p.k_head_stride}, p.dtype) ||
        !aligned(p.v, 16, {p.v_outer_stride, p.v_token_stride, p.v_head_stride}, p.dtype) ||
        !aligned(p.out, 16, {p.out_batch_stride, p.out_token_stride, p.out_head_stride}, p.dtype)) {
        return refuse(why_not,
                      "it moves 16 bytes at a time, and some row of q, k_pages, v_pages or out does "
                      "not begin on a multiple of 16 bytes");
    }
    return row;
}

// One launch of the split-KV kernel to be planned.
struct SplitKvProblem {
    const AttentionParams& p;
    const Gpu& gpu;
    const DecodeShape& shape;
    int32_t batch;   // sequences of this launch
    int32_t blocks;  // of a sequence, at most

    int64_t items() const { return int64_t{batch} * p.num_kv_heads; }
    int32_t rows() const { return p.seqlen_q * p.group_size(); }
};

// Whether items may have equally many CTAs each, which shares out the work well whatever the lengths are. One
// sequence; or short items, of up to `short_keys`, if CTAs are few or have 64 KB to read (256 sequences of 96
// keys, 8 KV heads of dim 64: 24 us, 16 by stream_k_decode); or so many items that SMs which have a short one
// take more of them: a long one that starts last takes an SM 8 us at most.
bool splits_evenly(const SplitKvProblem& problem, int32_t short_keys) {
    const AttentionParams& p = problem.p;
    const int64_t items = problem.items(), sms = problem.gpu.num_sms;
    if (problem.batch == 1 && items <= sms) return true;
    const int64_t item_bytes = int64_t{p.seqlen_k} * p.head_dim * 2 * size_of(p.dtype);
    constexpr int64_t kManyBytes = 512 * 1024;
    const bool has_enough = item_bytes >= 64 * 1024;
    if (!p.batch_invariant && items >= 6 * sms && has_enough && item_bytes <= kManyBytes) return true;
    return p.seqlen_k <= short_keys && (items <= 4 * sms || has_enough);
}

// Whether items may have CTAs by their length: if each has two or more where they are equally long.
bool splits_by_length(const SplitKvProblem& problem) {
    return problem.batch <= kMaxSequencesByLength && problem.p.seqlen_k < (1 << 28) &&
           2 * problem.items() <= problem.gpu.num_sms;
}

// Combiners, and how many of their warps share a row.
void choose_combiners(SplitKvPlan& plan, const SplitKvShape& shape, int32_t num_rows) {
    plan.warps_per_row_log2 = plan.combiners_per_item = 0;
    if (plan.num_splits == 1) return;
    // A lane has up to eight splits.
    while (1 << plan.warps_per_row_log2 < shape.warps && 8 << plan.warps_per_row_log2 < plan.num_splits)
        ++plan.warps_per_row_log2;
    const int32_t rows_per_combiner = shape.warps >> plan.warps_per_row_log2;
    plan.combiners_per_item = static_cast<int32_t>(ceil_divide(num_rows, rows_per_combiner));
}

// Cuts items into `most` splits or as many as `slots` CTAs a KV head allow, combiners left out.
void choose_splits(SplitKvPlan& plan, const SplitKvProblem& problem, const SplitKvShape& shape, int32_t slots,
                   int32_t most) {
    const int32_t batch = problem.batch;
    plan.num_slots = std::max(slots, batch);
    const int32_t splits = plan.policy == SplitPolicy::by_length ? plan.num_slots - batch + 1 : slots / batch;
    plan.num_splits = std::max(std::min(splits, most), 1);
    plan.num_slots = std::min(plan.num_slots, batch * plan.num_splits);
    choose_combiners(plan, shape, problem.rows());
}

// As many splits as SMs allow; of what is soon read, as three SMs in seven do, so that the next launch starts
// on others meanwhile. (One sequence of 4096 keys, 8 heads: 7.6 us on 56 CTAs of 132, 9.1 on 64, 8.0 on 136.)
void choose_splits(SplitKvPlan& plan, const SplitKvProblem& problem, const SplitKvShape& shape) {
    constexpr int64_t kSoonRead = 384 * 1024;  // bytes, by a CTA
    const int32_t sms = problem.gpu.num_sms, heads = problem.p.num_kv_heads, few = sms * 3 / 7;
    // More than 32 splits cost as much combining as they save, up to twice as many keys.
    int32_t most = shape.splits_of(problem.blocks);
    if (most > 32) most = std::max(32, most / 2);
    auto fits = [&] {
        return plan.num_splits == 1 ||
               heads * (plan.num_slots + problem.batch * plan.combiners_per_item) <= few;
    };
    choose_splits(plan, problem, shape, sms / heads, most);
    if (fits()) return;
    const SplitKvPlan all = plan;
    int32_t slots = sms / 2 / heads;
    for (; slots > 0; --slots) {
        choose_splits(plan, problem, shape, slots, most);
        if (fits()) break;
    }
    const int64_t bytes = problem.items() * problem.blocks * shape.block_bytes;
    if (slots == 0 || bytes > kSoonRead * heads * plan.num_slots) plan = all;
}

// Sets the configuration, which decides how many warps a CTA has and how large a partial result is.
void set_items(SplitKvPlan& plan, const SplitKvProblem& problem, SplitKvItems items,
               const SplitKvShape& shape) {
    plan.items = items;
    plan.threads = 32 * shape.warps;
    plan.partial_words = plan.num_splits > 1 ? problem.rows() * shape.row_words : 0;
}

SplitKvPlan plan_even_splits(SplitKvPlan plan, const SplitKvProblem& problem) {
    const DecodeShape& shape = problem.shape;
    plan.policy = SplitPolicy::even;
    choose_splits(plan, problem, shape.long_items);
    const bool is_many = plan.num_splits == 1 && problem.items() > 2 * problem.gpu.num_sms;
    const bool is_short = plan.num_splits == 1 && problem.p.seqlen_k <= shape.short_keys;
    if (is_many || (is_short && !shape.has_short_items)) {
        set_items(plan, problem, SplitKvItems::many_items, shape.many_items);
    } else if (is_short) {
        set_items(plan, problem, SplitKvItems::short_items, shape.short_items);
    } else {
        set_items(plan, problem, SplitKvItems::long_items, shape.long_items);
    }
    return plan;
}

SplitKvPlan plan_splits_by_length(SplitKvPlan plan, const SplitKvProblem& problem) {
    plan.policy = SplitPolicy::by_length;
    choose_splits(plan, problem, problem.shape.by_length);
    set_items(plan, problem, SplitKvItems::long_items, problem.shape.by_length);
    return plan;
}

SplitKvPlan plan_fixed_splits(SplitKvPlan plan, const SplitKvProblem& problem) {
    const DecodeShape& shape = problem.shape;
    plan.policy = SplitPolicy::fixed;
    plan.max_fixed_splits_log2 = shape.max_fixed_splits_log2(problem.p.num_kv_heads);
    plan.num_splits = shape.most_fixed_splits(plan.max_fixed_splits_log2, problem.blocks);
    plan.num_slots = problem.batch * plan.num_splits;
    choose_combiners(plan, shape.long_items, problem.rows());
    const int64_t ctas = int64_t{problem.p.num_kv_heads} * plan.num_slots, sms = problem.gpu.num_sms;
    plan.length_first = plan.num_splits > 1 && ctas > 4 * sms;
    // Two CTAs an SM where some start while others end.
    const bool is_short = plan.num_splits == 1 && problem.p.seqlen_k <= shape.short_keys;
    if (ctas > sms || is_short) {
        set_items(plan, problem, SplitKvItems::short_items, shape.short_items);
    } else {
        set_items(plan, problem, SplitKvItems::long_items, shape.long_items);
    }
    return plan;
}

const char* name_of(SplitPolicy policy) {
    switch (policy) {
        case SplitPolicy::even: break;
        case SplitPolicy::by_length: return "by_length";
        case SplitPolicy::fixed: return "fixed";
    }
    return "even";
}

const char* name_of(SplitKvItems items) {
    switch (items) {
        case SplitKvItems::long_items: break;
        case SplitKvItems::short_items: return "short";
        case SplitKvItems::many_items: return "many";
    }
    return "long";
}

std::string name_of(const char* kernel, DType dtype, const DecodeTiles& tiles) {
    return text_of(kernel, "<", to_string(dtype), ", head_dim ", tiles.head_dim, ", ", tiles.rows(),
                   " rows>");
}

// "64 CTAs of 256 threads"
std::string ctas_of(const Grid& grid, int32_t threads) {
    return text_of(counted(grid.size(), "CTA"), " of ", threads, " threads");
}

// The summary of a plan whose CTAs share out the work.
template <class Plan>
std::string shared_out(const Plan& plan, const char* what) {
    return text_of(counted(plan.num_kv_heads, "KV head"), " x ", counted(plan.num_sequences, "sequence"),
                   ", ", what, " shared out on the device: ", ctas_of(plan.grid(), plan.threads));
}

}  // namespace

Grid SplitKvPlan::grid() const {
    if (policy == SplitPolicy::by_length)
        return {num_kv_heads, num_slots + int64_t{num_sequences} * combiners_per_item};
    return {num_kv_heads, num_sequences, num_splits + combiners_per_item};
}

std::optional<SplitKvPlan> plan_split_kv(const AttentionParams& p, const Gpu& gpu, std::string* why_not) {
    const std::optional<int32_t> row = choose_tiles(p, gpu, why_not);
    if (!row) return std::nullopt;
    if (p.window_left >= 0 || p.prefix_lens) {
        return refuse(why_not, "it reads all keys of a sequence, and this call has ",
                      p.prefix_lens ? "prefix_lens" : "a window");
    }
    if (p.num_pages == 0 || p.seqlen_k == 0) return refuse(why_not, "there are no pages to read");
    if (!p.seq_lens || p.num_skipped_keys > 0)
        return refuse(why_not, "it reads whole sequences, and this is a part of those that share a prefix");
    SplitKvPlan plan{};
    plan.dtype = p.dtype;
    plan.row = *row;
    plan.num_sequences = count_sequences(p);
    plan.num_kv_heads = p.num_kv_heads;
    const DecodeShape& shape = kShapes[*row];
    const SplitKvProblem problem{p, gpu, shape, plan.num_sequences, (p.seqlen_k - 1) / kBlockKeys + 1};
    if (!p.batch_invariant) {
        if (splits_evenly(problem, shape.short_keys)) return plan_even_splits(plan, problem);
        if (splits_by_length(problem)) return plan_splits_by_length(plan, problem);
        return refuse(why_not,
                      "it shares out the work before the lengths are known, which would be uneven for ",
                      counted(plan.num_sequences, "sequence"), " of up to ", counted(p.seqlen_k, "key"),
                      " x ", counted(p.num_kv_heads, "KV head"), " on ", gpu.num_sms, " SMs");
    }
    // A CTA for each fixed split, unless there is room for so many that in a ragged batch those which have
    // nothing to do would take longer than the others.
    constexpr int64_t kMostOnSm = 64;
    const int64_t splits = problem.items() * shape.most_fixed_splits(
                                                 shape.max_fixed_splits_log2(p.num_kv_heads), problem.blocks);
    if (!splits_evenly(problem, shape.short_fixed_keys) && splits > kMostOnSm * gpu.num_sms) {
        return refuse(why_not,
                      "batch_invariant has a CTA for each split that there is room for in page_table, "
                      "and ",
                      splits, " are more than ", kMostOnSm, " on each of ", gpu.num_sms, " SMs");
    }
    return plan_fixed_splits(plan, problem);
}

std::optional<StreamKPlan> plan_stream_k(const AttentionParams& p, const Gpu& gpu, std::string* why_not) {
    if (p.batch_invariant)
        return refuse(why_not,
                      "where it cuts a sequence depends on the others, and batch_invariant is given");
    const std::optional<int32_t> row = choose_tiles(p, gpu, why_not);
    if (!row) return std::nullopt;
    const DecodeShape& shape = kShapes[*row];
    StreamKPlan plan{};
    plan.dtype = p.dtype;
    plan.row = *row;
    plan.num_sequences = count_sequences(p);
    plan.num_kv_heads = p.num_kv_heads;
    plan.num_ctas = std::min(gpu.num_sms, kMaxDecodeCtas);
    plan.threads = shape.stream_k_threads;
    const int64_t rows = int64_t{plan.num_ctas} * shape.stream_k_rows;
    plan.partial_bytes = 2 * rows * shape.stream_k_row_words * int64_t{sizeof(float)};
    plan.num_counters = rows;
    return plan;
}

std::optional<BatchInvariantDecodePlan> plan_batch_invariant_decode(const AttentionParams& p, const Gpu& gpu,
                                                                    std::string* why_not) {
    if (!p.batch_invariant)
        return refuse(why_not, "its splits are those of batch_invariant, which is not given");
    const std::optional<int32_t> row = choose_tiles(p, gpu, why_not);
    if (!row) return std::nullopt;
    const DecodeShape& shape = kShapes[*row];
    BatchInvariantDecodePlan plan{};
    plan.dtype = p.dtype;
    plan.row = *row;
    plan.num_sequences = count_sequences(p);
    plan.num_kv_heads = p.num_kv_heads;
    plan.num_ctas = std::min(gpu.num_sms, kMaxDecodeCtas);
    plan.threads = shape.batch_invariant_threads;
    plan.num_rows = p.seqlen_q * p.group_size();
    // Prefix and window may each begin in a block of their own.
    const int64_t blocks = p.seqlen_k / kBlockKeys + 2;
    plan.max_splits = shape.most_fixed_splits(shape.max_fixed_splits_log2(p.num_kv_heads), blocks);
    const int64_t runs =
        ceil_divide(blocks * p.num_kv_heads * plan.num_sequences, shape.batch_invariant_min_blocks);
    plan.workspace_words = std::min<int64_t>(runs, plan.num_ctas) * plan.num_rows * plan.max_splits *
                           shape.batch_invariant_row_words;
    return plan;
}

Explanation describe(const SplitKvPlan& plan) {
    Explanation text;
    text.kernel = name_of("split_kv_decode", plan.dtype, plan.tiles());
    text.summary =
        text_of(counted(plan.num_kv_heads, "KV head"), " x ", counted(plan.num_sequences, "sequence"), " x ");
    if (plan.policy == SplitPolicy::by_length) {
        text.summary += text_of("1 to ", counted(plan.num_splits, "split"), " by length, in ",
                                counted(plan.num_slots, "slot"), " a KV head");
    } else {
        const char* const at_most = plan.policy == SplitPolicy::fixed && plan.num_splits > 1 ? "up to " : "";
        text.summary += text_of(at_most, counted(plan.num_splits, "split"));
    }
    if (plan.combiners_per_item > 0)
        text.summary += text_of(", and ", counted(plan.combiners_per_item, "combiner"), " per item");
    text.summary += ": " + ctas_of(plan.grid(), plan.threads);
    text.file = "src/cuda/decode/split_kv.cuh";
    text.plan = {
        {"dtype", to_string(plan.dtype)},
        {"head_dim", plan.tiles().head_dim},
        {"rows", plan.tiles().rows()},
        {"policy", name_of(plan.policy)},
        {"items", name_of(plan.items)},
        {"num_sequences", plan.num_sequences},
        {"num_kv_heads", plan.num_kv_heads},
        {"num_splits", plan.num_splits},
        {"num_slots", plan.num_slots},
        {"combiners_per_item", plan.combiners_per_item},
        {"warps_per_row", 1 << plan.warps_per_row_log2},
        {"max_fixed_splits", 1 << plan.max_fixed_splits_log2},
        {"length_first", plan.length_first},
        {"num_ctas", plan.grid().size()},
        {"threads", plan.threads},
        {"workspace_bytes", plan.workspace_bytes()},
    };
    return text;
}

Explanation describe(const StreamKPlan& plan) {
    Explanation text;
    text.kernel = name_of("stream_k_decode", plan.dtype, plan.tiles());
    text.summary = shared_out(plan, "blocks of 16 keys");
    text.file = "src/cuda/decode/stream_k.cuh";
    text.plan = {
        {"dtype", to_string(plan.dtype)},    {"head_dim", plan.tiles().head_dim},
        {"rows", plan.tiles().rows()},       {"num_sequences", plan.num_sequences},
        {"num_kv_heads", plan.num_kv_heads}, {"num_ctas", plan.num_ctas},
        {"threads", plan.threads},           {"partial_bytes", plan.partial_bytes},
        {"num_counters", plan.num_counters}, {"workspace_bytes", plan.workspace_bytes()},
    };
    return text;
}

Explanation describe(const BatchInvariantDecodePlan& plan) {
    Explanation text;
    text.kernel = name_of("batch_invariant_decode", plan.dtype, plan.tiles());
    text.summary = shared_out(plan, "fixed splits");
    text.file = "src/cuda/decode/batch_invariant.cuh";
    text.plan = {
        {"dtype", to_string(plan.dtype)},    {"head_dim", plan.tiles().head_dim},
        {"rows", plan.tiles().rows()},       {"num_sequences", plan.num_sequences},
        {"num_kv_heads", plan.num_kv_heads}, {"num_rows", plan.num_rows},
        {"max_splits", plan.max_splits},     {"num_ctas", plan.num_ctas},
        {"threads", plan.threads},           {"workspace_bytes", plan.workspace_bytes()},
    };
    return text;
}

std::vector<std::string> decode_instances() {
    std::vector<std::string> names;
    for (const char* kernel : {"split_kv_decode", "stream_k_decode", "batch_invariant_decode"}) {
        for (DType dtype : kAttentionTypes) {
            for (const DecodeTiles& tiles : kDecodeTiles) names.push_back(name_of(kernel, dtype, tiles));
        }
    }
    return names;
}

}  // namespace octavo::cuda
