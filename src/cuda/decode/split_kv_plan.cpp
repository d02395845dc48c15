#include "cuda/decode/instances.h"
#include "cuda/decode/plan.h"

#include <algorithm>

namespace octavo::cuda {
namespace {

// How many bits a head's row of keys and its row of values have together.
int32_t row_bits(const AttentionParams& p) {
    return p.head_dim * bits_of(p.k_dtype) + p.head_dim_v * bits_of(p.v_dtype);
}

// One launch of the split-KV kernel to be planned.
struct SplitKvProblem {
    const AttentionParams& p;
    const Gpu& gpu;
    const DecodeShape& shape;
    int32_t batch;   // sequences of this launch
    int32_t blocks;  // the most blocks that the queries of a sequence see

    int64_t items() const { return int64_t{batch} * p.num_kv_heads; }
    int32_t rows() const { return p.seqlen_q * p.group_size(); }
    bool has_codes() const { return is_code(p.k_dtype); }
    int64_t keys() const { return std::min<int64_t>(p.seqlen_k, int64_t{blocks} * shape.block_keys); }
    int64_t item_bytes() const { return keys() * row_bits(p) / 8; }
    bool is_short() const { return keys() <= shape.short_keys; }
};

// The most blocks that the queries of a sequence see.
int32_t max_visible_blocks(const AttentionParams& p, int32_t block_keys) {
    int64_t keys = p.seqlen_k;
    if (p.chosen_pages) keys = std::min(keys, int64_t{p.chosen_pages.num_chosen} * p.page_size);
    const int64_t all = (keys - 1) / block_keys + 1;
    if (p.window_left < 0 || p.prefix_lens) return static_cast<int32_t>(all);
    return static_cast<int32_t>(std::min(all, (int64_t{p.window_left} + p.seqlen_q) / block_keys + 2));
}

// Chooses the number of combiners, and how many of their warps share a row.
void choose_combiners(SplitKvPlan& plan, const SplitKvShape& shape, int32_t num_rows) {
    plan.warps_per_row_log2 = plan.combiners_per_item = 0;
    if (plan.num_splits == 1) return;
    // A lane reads up to eight splits, or more where a CTA's warps cannot be divided further. By length,
    // hardly any item has as many splits as one may have, so that more combiners are made for the mean alone.
    auto are_too_many = [&](int32_t warps_log2) {
        const int32_t mean = plan.num_slots / plan.num_sequences;
        const bool need_combiners = num_rows > shape.warps >> (warps_log2 + 1);
        const bool for_mean = plan.policy == SplitPolicy::by_length && need_combiners;
        return 8 << warps_log2 < (for_mean ? mean : plan.num_splits);
    };
    while (shape.warps % (2 << plan.warps_per_row_log2) == 0 && are_too_many(plan.warps_per_row_log2))
        ++plan.warps_per_row_log2;
    const int32_t rows_per_combiner = shape.warps >> plan.warps_per_row_log2;
    plan.combiners_per_item = static_cast<int32_t>(ceil_divide(num_rows, rows_per_combiner));
}

// Cuts items into `most` splits, or into as many as `slots` CTAs per KV head, not counting combiners, allow.
void choose_splits(SplitKvPlan& plan, const SplitKvProblem& problem, const SplitKvShape& shape, int32_t slots,
                   int32_t most) {
    const int32_t batch = problem.batch;
    plan.num_slots = std::max(slots, batch);
    const int32_t splits = plan.policy == SplitPolicy::by_length ? plan.num_slots - batch + 1 : slots / batch;
    plan.num_splits = std::max(std::min(splits, most), 1);
    plan.num_slots = std::min(plan.num_slots, batch * plan.num_splits);
    choose_combiners(plan, shape, problem.rows());
    // By length, a combiner has to wait for all lengths first; the last split of its item knows them.
    if (plan.policy == SplitPolicy::by_length && plan.combiners_per_item == 1) plan.combiners_per_item = 0;
}

// Makes fewer splits than `all` has where its combiners would find no SM until a split leaves one, if the
// queues of a CTA still hold all that it reads. (A step of Llama-2-7B with one sequence of 1056 tokens, whose
// 32 KV heads then have three splits instead of four, takes 0.9 % less on an H200.)
SplitKvPlan with_room_for_combiners(const SplitKvPlan& all, const SplitKvProblem& problem,
                                    const SplitKvShape& shape) {
    constexpr int64_t kQueues = 224 * 1024;
    const int32_t sms = problem.gpu.num_sms, heads = problem.p.num_kv_heads;
    if (problem.has_codes() || all.policy != SplitPolicy::even) return all;
    SplitKvPlan fewer = all;
    while (heads * (fewer.num_slots + problem.batch * fewer.combiners_per_item) > sms) {
        if (fewer.num_splits <= 2) return all;
        const int32_t splits = fewer.num_splits - 1;
        choose_splits(fewer, problem, shape, problem.batch * splits, splits);
    }
    return problem.item_bytes() <= kQueues * fewer.num_splits ? fewer : all;
}

// Lets the last split of an item combine its splits, where a combiner would find no SM until a split leaves
// one. With longer splits than these, some end early enough. (One sequence of 8192 keys of int4 with 8 heads
// then takes 6.3 us instead of 6.8.)
void combine_in_last_split(SplitKvPlan& plan, const SplitKvProblem& problem) {
    constexpr int64_t kShortSplit = 96 * 1024;  // bytes
    const int32_t ctas = plan.num_kv_heads * (plan.num_slots + problem.batch * plan.combiners_per_item);
    if (plan.combiners_per_item == 1 && ctas > problem.gpu.num_sms &&
        problem.item_bytes() <= kShortSplit * plan.num_splits)
        plan.combiners_per_item = 0;
}

// Makes as many splits as there are SMs. If a CTA would be done soon, makes only as many as fill three SMs in
// seven, so that the next launch starts on the others meanwhile. (One sequence of 4096 keys with 8 heads took
// 7.6 us on 56 CTAs, of 132 SMs, 9.1 us on 64 CTAs and 8.0 us on 136.)
void choose_splits(SplitKvPlan& plan, const SplitKvProblem& problem, const SplitKvShape& shape) {
    constexpr int64_t kSoonRead = 384 * 1024;  // bytes that a CTA reads
    const int32_t sms = problem.gpu.num_sms, heads = problem.p.num_kv_heads, few = sms * 3 / 7;
    // Combining more than 32 splits costs as much as they save, until each is twice as long.
    const int32_t blocks = problem.blocks;
    int32_t most =
        blocks <= 2 * shape.min_blocks ? 1 : static_cast<int32_t>(ceil_divide(blocks, shape.min_blocks));
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
    // What the CTAs of a sequence read together, as many as it has where all are alike.
    const int64_t bytes = int64_t{heads} * blocks * shape.block_bytes;
    const int32_t ctas = heads * (plan.num_slots / problem.batch);
    // Over codes, CTAs take longer to compute than to read.
    if (slots == 0 || bytes > kSoonRead * ctas || problem.has_codes()) {
        plan = with_room_for_combiners(all, problem, shape);
        combine_in_last_split(plan, problem);
    }
}

// Sets the configuration, and with it how many warps a CTA has and how large a partial result is.
SplitKvPlan with_items(SplitKvPlan plan, const SplitKvProblem& problem, SplitKvItems items) {
    const DecodeShape& shapes = problem.shape;
    if (items == SplitKvItems::short_items && !shapes.has_short_items && plan.policy != SplitPolicy::fixed)
        items = SplitKvItems::many_items;
    const SplitKvShape& shape = plan.policy == SplitPolicy::by_length ? shapes.by_length
                                : plan.policy == SplitPolicy::fixed   ? shapes.fixed
                                : items == SplitKvItems::short_items  ? shapes.short_items
                                : items == SplitKvItems::many_items   ? shapes.many_items
                                                                      : shapes.long_items;
    plan.items = items;
    plan.threads = 32 * shape.warps;
    plan.partial_words = plan.num_splits > 1 ? problem.rows() * shape.row_words : 0;
    return plan;
}

// For one sequence, or short items: the same number of CTAs for each item balances the work well, whatever
// the lengths are.
SplitKvPlan plan_even_splits(SplitKvPlan plan, const SplitKvProblem& problem) {
    plan.policy = SplitPolicy::even;
    choose_splits(plan, problem, problem.shape.long_items);
    SplitKvItems items = SplitKvItems::long_items;
    if (plan.num_splits == 1 && problem.items() > 2 * problem.gpu.num_sms) {
        items = SplitKvItems::many_items;
    } else if (plan.num_splits == 1 && problem.is_short()) {
        items = SplitKvItems::short_items;
    }
    return with_items(plan, problem, items);
}

SplitKvPlan plan_splits_by_length(SplitKvPlan plan, const SplitKvProblem& problem) {
    plan.policy = SplitPolicy::by_length;
    plan.length_first = true;
    choose_splits(plan, problem, problem.shape.by_length);
    return with_items(plan, problem, SplitKvItems::long_items);
}

// How many splits of about one size an item of full length has.
int64_t sized_splits(const SplitKvProblem& problem) {
    // Beyond head dim 256, an SM has room for one CTA, and reads nothing while the next one starts.
    const int32_t head_dim = std::max(problem.p.head_dim, problem.p.head_dim_v);
    const bool is_large = head_dim > 256 && problem.items() >= problem.gpu.num_sms;
    const int64_t split_bytes = (head_dim <= 64 ? 768 : is_large ? 2048 : 512) * 1024;
    return (problem.item_bytes() + split_bytes / 2) / split_bytes;
}

// The most CTAs of sized splits on an SM. Of more, most might find no work, and all would take longer than
// the others.
constexpr int64_t kMostSizedOnSm = 16;

// Above this size of an item, in bytes, a CTA that reads it alone would often be waited for.
constexpr int64_t kLong = 1024 * 1024;

// Whether the one CTA that reads an item takes so little time that a second one would save none.
bool is_brief(const SplitKvProblem& problem) {
    return problem.keys() <= 512 || problem.item_bytes() <= 256 * 1024;
}

// Whether the launch serves all sequences from their first key on.
bool is_whole_batch(const AttentionParams& p) { return p.num_skipped_keys == 0 && p.most_queries == 0; }

// Whether a batch over codes is for the stream-K kernel, which shares out any lengths evenly but takes a few
// microseconds more, and not for sized splits. It is where the room is likely to be much more than most
// sequences take: splits of that size are then too few for SMs that compute, and where there are many items
// the longest ones are hardly cut. Over values of int4, which take most computing for their bytes, it is also
// where there is much to do in few and long items for each SM. (64 sequences of 1 to 4096 keys with 8 heads
// of 128 take 45 us instead of 53; if all have 4096, both take 75.) With more rows, at other head dims and
// for a part of a batch, sized splits were as fast or were not compared.
bool suits_stream_k(const SplitKvProblem& problem) {
    constexpr int64_t kRoomy = 8;              // splits of an item of full length
    constexpr int64_t kMuch = 3 * 512 * 1024;  // bytes on each SM
    constexpr int64_t kShort = 256 * 1024;     // bytes of an item
    const AttentionParams& p = problem.p;
    const int32_t head_dim = std::max(p.head_dim, p.head_dim_v);
    if (!is_whole_batch(p) || problem.rows() > 8 || head_dim <= 64 || head_dim > 128) return false;
    if (sized_splits(problem) >= kRoomy) return true;
    const int64_t items = problem.items(), sms = problem.gpu.num_sms, item_bytes = problem.item_bytes();
    return p.v_dtype == DType::int4 && items >= sms && items <= 8 * sms && item_bytes > kShort &&
           items * item_bytes >= kMuch * sms;
}

// Whether splits are by length, and not sized. That is as fast or faster where four CTAs or more are left for
// each item, or two over codes; with fewer only where sized splits would be too few for all SMs, or more than
// kMostSizedOnSm. Where less than two are left, most items take one, which needs no combining, and the
// longest ones the others: that was faster at head dims above 64 and up to 128.
bool suits_by_length(const SplitKvProblem& problem) {
    const AttentionParams& p = problem.p;
    const int64_t items = problem.items(), sms = problem.gpu.num_sms;
    if (problem.batch > kMaxSequencesByLength || p.seqlen_k >= 1 << 28 || items > sms) return false;
    const int64_t ctas = items * sized_splits(problem);
    if (2 * items <= sms && ctas < sms) return true;
    // Splits by length have no place beside the kernel over a shared prefix. They do not serve a part of a
    // batch (plan_decode_at_once), for which sized splits are left where there are many.
    if (!is_whole_batch(p)) return false;
    if (2 * items > sms) {
        const int32_t head_dim = std::max(p.head_dim, p.head_dim_v);
        if (head_dim <= 64 || head_dim > 128) return false;
        if (problem.has_codes()) return problem.keys() <= 1024 && problem.item_bytes() >= 128 * 1024;
        const bool has_more_ctas = sms / p.num_kv_heads > problem.batch;  // for the longest items
        return !is_brief(problem) && problem.item_bytes() <= (has_more_ctas ? kLong : kLong / 2);
    }
    return 4 * items <= sms || problem.has_codes() || ctas > kMostSizedOnSm * sms;
}

// Gives each item as many CTAs as its own length asks for; SMs with short CTAs then take more of them.
// Returns nothing if they might be too many.
std::optional<SplitKvPlan> plan_sized_splits(SplitKvPlan plan, const SplitKvProblem& problem,
                                             std::string* why_not) {
    const int64_t items = problem.items(), sms = problem.gpu.num_sms, item_bytes = problem.item_bytes();
    int64_t splits = sized_splits(problem);
    if (problem.has_codes()) {
        if (suits_stream_k(problem)) {
            return refuse(why_not, "over codes, lengths up to ", problem.keys(),
                          " keys may differ so much that stream_k_decode balances them better");
        }
        // Over codes, CTAs take longer to compute than to read. So there are either as many as run at a time,
        // or so many that it does not matter which SMs have one more.
        const int64_t at_a_time = sms * problem.shape.short_items.ctas;
        if (items * splits < 2 * at_a_time)
            splits = std::max<int64_t>(std::min(at_a_time / items, item_bytes / (64 * 1024)), 1);
        if (items >= 4 * sms)
            splits = std::clamp<int64_t>(splits, 1, std::max<int64_t>(kMostSizedOnSm * sms / items, 1));
    } else {
        splits = std::max(splits, std::min(ceil_divide(sms, items), item_bytes / (64 * 1024)));
        // Whole items need no combining. They take one CTA each where these fill the places for them nearly
        // twice, and none is waited for long; and where they leave less than half of the SMs idle, but take
        // so little time that a second CTA would save none. (128 sequences of 2048 keys with 4 heads of 128
        // take 125 us instead of 130 on an H200, and 20 of 512 keys 8.2 instead of 11.)
        const int64_t places = sms * problem.shape.short_items.ctas;
        const bool are_many = 4 * items >= 7 * places && item_bytes <= kLong;
        const bool fill_most_sms = 2 * items > sms && items <= sms;
        if (are_many || (fill_most_sms && is_brief(problem))) splits = 1;
    }
    splits = std::clamp<int64_t>(splits, 1, problem.blocks);
    if (splits > 1 && items * splits > kMostSizedOnSm * sms) {
        return refuse(why_not,
                      "it has a CTA for each split that a sequence may have, before lengths are known, and ",
                      counted(problem.batch, "sequence"), " of up to ", counted(problem.p.seqlen_k, "key"),
                      " x ", counted(problem.p.num_kv_heads, "KV head"), " have ", items * splits,
                      ", more than ", kMostSizedOnSm, " on each of ", sms, " SMs");
    }
    plan.policy = splits > 1 ? SplitPolicy::sized : SplitPolicy::even;
    plan.num_splits = static_cast<int32_t>(splits);
    plan.num_slots = problem.batch * plan.num_splits;
    choose_combiners(plan, problem.shape.short_items, problem.rows());
    if (splits > 1) {
        plan.length_first = true;
        plan.blocks_per_split = static_cast<int32_t>(ceil_divide(problem.blocks, splits));
    } else if (items > 2 * sms && (item_bytes <= 128 * 1024 || items >= 4 * sms)) {
        return with_items(plan, problem, SplitKvItems::many_items);
    }
    return with_items(plan, problem, SplitKvItems::short_items);
}

// Makes a CTA for each split that page_table has room for. The batch is cut into launches, each of as many
// sequences as have up to kMostOnSm CTAs per SM.
SplitKvPlan plan_fixed_splits(SplitKvPlan plan, const SplitKvProblem& problem) {
    constexpr int64_t kMostOnSm = 64;
    const DecodeShape& shape = problem.shape;
    const int64_t heads = problem.p.num_kv_heads, sms = problem.gpu.num_sms;
    plan.policy = SplitPolicy::fixed;
    plan.max_fixed_splits_log2 = shape.max_fixed_splits_log2(problem.p.num_kv_heads);
    // In a batch, one split of a short window's keys is faster than two by up to a fifth; one sequence alone
    // takes up to a tenth longer.
    constexpr int32_t kShortWindow = 1024;
    if (problem.p.window_left >= 0 && problem.p.window_left <= kShortWindow && !problem.p.prefix_lens)
        plan.max_fixed_splits_log2 = 0;
    plan.num_splits = shape.most_fixed_splits(plan.max_fixed_splits_log2, problem.blocks);
    plan.num_sequences = static_cast<int32_t>(
        std::min<int64_t>(problem.batch, std::max<int64_t>(kMostOnSm * sms / (heads * plan.num_splits), 1)));
    plan.num_slots = plan.num_sequences * plan.num_splits;
    choose_combiners(plan, shape.fixed, problem.rows());
    const int64_t ctas = heads * plan.num_slots;
    if (plan.num_splits > 1 && ctas > 4 * sms) plan.length_first = true;
    // An SM has two CTAs where some start while others end. Chosen pages have no other instance.
    const bool is_short = (plan.num_splits == 1 && problem.is_short()) || plan.has_chosen_pages;
    return with_items(plan, problem,
                      ctas > sms || is_short ? SplitKvItems::short_items : SplitKvItems::long_items);
}

}  // namespace

Grid SplitKvPlan::grid() const {
    if (policy == SplitPolicy::by_length)
        return {num_kv_heads, num_slots + int64_t{num_sequences} * combiners_per_item};
    return {num_kv_heads, num_sequences, num_splits + combiners_per_item};
}

std::optional<SplitKvPlan> plan_split_kv(const AttentionParams& call, const Gpu& gpu, std::string* why_not) {
    const int32_t group_parts = group_parts_of(call);
    const AttentionParams p = with_group_parts(call, group_parts);
    const std::optional<Instance> instance = choose_instance(p, gpu, why_not);
    if (!instance) return std::nullopt;
    if (!p.seq_lens)
        return refuse(why_not, "this is a shared prefix, whose runs have no lengths on the device");
    if (p.prefix_lens && p.window_left >= 0 && !p.batch_invariant) {
        return refuse(why_not,
                      "with prefix_lens and a window, an item's blocks do not follow each other, and "
                      "its warps take them in turns");
    }
    const DecodeShape& shape = shape_of(instance->codes, instance->row);
    SplitKvPlan plan{};
    plan.dtype = p.dtype;
    plan.codes = instance->codes;
    plan.row = instance->row;
    plan.num_sequences = count_sequences(p);
    plan.num_kv_heads = p.num_kv_heads;
    plan.group_parts = group_parts;
    plan.block_keys = shape.block_keys;
    plan.max_visible_blocks = max_visible_blocks(p, shape.block_keys);
    plan.blocks_per_split = 1;
    plan.has_chosen_pages = static_cast<bool>(p.chosen_pages);
    plan.length_first = p.window_left >= 0 || p.prefix_lens || p.chosen_pages;
    const SplitKvProblem problem{p, gpu, shape, plan.num_sequences, plan.max_visible_blocks};
    const int64_t items = problem.items(), sms = gpu.num_sms;
    if (p.batch_invariant || p.chosen_pages) return plan_fixed_splits(plan, problem);
    // Even splits serve short items if there are few, or if each has 64 KB to read. (Otherwise splits of one
    // size do: 256 sequences of 96 keys with 8 KV heads of dim 64 took 24 us, and 16 us by these.)
    const bool is_short = problem.is_short() && (items <= 4 * sms || problem.item_bytes() >= 64 * 1024);
    if ((problem.batch == 1 && items <= sms) || is_short) return plan_even_splits(plan, problem);
    if (suits_by_length(problem)) return plan_splits_by_length(plan, problem);
    return plan_sized_splits(plan, problem, why_not);
}

}  // namespace octavo::cuda
