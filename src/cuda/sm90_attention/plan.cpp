#include "cuda/sm90_attention/plan.h"

#include "cuda/cache_arrays.h"

#include <algorithm>
#include <iterator>
#include <numeric>

namespace octavo::cuda {
namespace {

constexpr int32_t kGroupRows = kSm90GroupRows;
constexpr int64_t kMaxIndex = (int64_t{1} << 31) - 1;

// Whether only the first row of each head dim has instances for the call.
bool has_first_row_alone(const AttentionParams& p) { return p.has_tree_mask || p.ranges; }

// Whether a packed batch may hold row tiles of few rows. Which of the two kernels a batch takes changes no
// bits of sequences that have none: both compute full row tiles in the same way.
bool may_have_few_rows(const AttentionParams& p, const Sm90Tiles& tiles, int32_t heads, bool has_codes) {
    if (!p.cu_seqlens_q || p.alibi_slopes || p.dropout.any() || has_first_row_alone(p)) return false;
    const int32_t rest = p.seqlen_q % (tiles.row_blocks() * (kGroupRows / heads));
    return p.batch_invariant || p.total_q != int64_t{p.batch} * p.seqlen_q ||
           (rest > 0 && rest * heads <= max_few_rows(tiles.head_dim, has_codes));
}

// How many blocks of 64 rows an instance works through, wasted ones included; instances are compared by it.
// For dense and packed arrays, and where bits must not depend on the batch, this counts one sequence of the
// given length. Otherwise, for paged arrays, it is the time that the SMs take, in rounds of one row tile
// each.
int64_t padded_blocks(const AttentionParams& p, const Gpu& gpu, const Sm90Tiles& tiles, int32_t heads) {
    const int32_t blocks = tiles.row_blocks();
    if (!p.paged() || p.batch_invariant)
        return blocks * ceil_divide(p.seqlen_q, int64_t{blocks} * (kGroupRows / heads));
    return blocks * ceil_divide(count_row_tiles(p, blocks, heads), gpu.num_sms);
}

// Whether `tiles` serve better than `before`, a row of the same head dim.
bool serve_better(const AttentionParams& p, const Gpu& gpu, const Sm90Tiles& tiles, const Sm90Tiles& before,
                  int32_t heads) {
    int64_t keys = p.window_right >= 0 ? p.seqlen_k - std::min(p.seqlen_q, p.seqlen_k) / 2 : p.seqlen_k;
    if (p.batch_invariant) keys = kMaxIndex;  // the width of the page table is the batch's
    if (p.window_left >= 0) keys = std::min<int64_t>(keys, p.window_left);
    if (keys < tiles.from_keys) return false;
    // Pairs of CTAs serve neither paged arrays nor windows: with a window, queries that stand far apart see
    // different keys.
    if (tiles.ctas > 1 && (p.paged() || p.window_left >= 0 || p.alibi_symmetric)) return false;
    return 100 * padded_blocks(p, gpu, tiles, heads) <= 106 * padded_blocks(p, gpu, before, heads);
}

// Whether tiles of `tile_dim` columns hold rows of `head_dim`, with some column in each block of columns,
// since a block that lies outside an array altogether must not be copied.
bool holds(int32_t tile_dim, int32_t head_dim) {
    return head_dim <= tile_dim &&
           ceil_divide(head_dim, kSm90BlockColumns) == ceil_divide(tile_dim, kSm90BlockColumns);
}
bool holds(const Sm90Tiles& tiles, const AttentionParams& p) {
    return holds(tiles.head_dim, p.head_dim) && holds(tiles.value_dim, p.head_dim_v);
}

// Among the rows of kSm90Tiles for the smallest head dims that hold the problem's, returns the last one that
// serves better than those before it; -1 if none holds them.
int32_t choose_tiles(const AttentionParams& p, const Gpu& gpu, int32_t heads) {
    int32_t best = -1;
    for (int32_t row = 0; row < static_cast<int32_t>(std::size(kSm90Tiles)); ++row) {
        const Sm90Tiles& tiles = kSm90Tiles[row];
        if (!holds(tiles, p)) continue;
        if (best >= 0 &&
            (tiles.head_dim != kSm90Tiles[best].head_dim || tiles.value_dim != kSm90Tiles[best].value_dim))
            break;
        if (best < 0 || (!has_first_row_alone(p) && serve_better(p, gpu, tiles, kSm90Tiles[best], heads)))
            best = row;
    }
    return best;
}

// Returns the row of kSm90CodeTiles that serves the problem; -1 if there is none. Instances for one block of
// rows serve where no sequence has more.
int32_t find_code_tiles(const AttentionParams& p, int32_t heads) {
    const bool one_block = int64_t{p.seqlen_q} * heads <= kGroupRows && !p.alibi_slopes && !p.has_tree_mask;
    for (int32_t row = 0; row < static_cast<int32_t>(std::size(kSm90CodeTiles)); ++row) {
        const Sm90Tiles& tiles = kSm90CodeTiles[row];
        if (tiles.head_dim >= p.head_dim && tiles.warpgroups == (one_block ? 1 : 2)) return row;
    }
    return -1;
}

// Among the rows of kSm90Tiles for the smallest head dims that hold the problem's, returns the one whose
// instance has a kernel that leaves room on its SM; -1 if there is none.
int32_t find_tiles_beside(const AttentionParams& p) {
    if (p.dropout.any() || p.alibi_slopes) return -1;
    const Sm90Tiles* smallest = nullptr;
    for (int32_t row = 0; row < static_cast<int32_t>(std::size(kSm90Tiles)); ++row) {
        const Sm90Tiles& tiles = kSm90Tiles[row];
        if (!holds(tiles, p)) continue;
        if (smallest == nullptr) smallest = &tiles;
        if (tiles.head_dim == smallest->head_dim && tiles.value_dim == smallest->value_dim &&
            has_beside(tiles.head_dim, tiles.warpgroups, tiles.ctas))
            return row;
    }
    return -1;
}

// The row of kSm90Tiles whose instances are compiled together with those for a block mask, and the row of
// kSm90BlockTiles; nothing if none serves.
struct BlockRows {
    int32_t row, block_row;
};
std::optional<BlockRows> find_block_tiles(const AttentionParams& p) {
    const int32_t head_dim = p.head_dim <= 64 ? 64 : 128;
    if (!holds(head_dim, p.head_dim) || !holds(head_dim, p.head_dim_v) || p.dropout.any() || p.alibi_slopes)
        return std::nullopt;
    BlockRows found{-1, -1};
    for (int32_t row = 0; row < static_cast<int32_t>(std::size(kSm90Tiles)); ++row) {
        const Sm90Tiles& tiles = kSm90Tiles[row];
        if (tiles.head_dim == head_dim && has_blocks(head_dim, tiles.warpgroups, tiles.ctas)) found.row = row;
    }
    for (int32_t row = 0; row < static_cast<int32_t>(std::size(kSm90BlockTiles)); ++row) {
        const auto& [block_size, tiles] = kSm90BlockTiles[row];
        if (tiles.head_dim == head_dim && block_size == p.block_mask.size) found.block_row = row;
    }
    return found;
}

// Whether the keys of a row tile may be split.
bool may_split(const AttentionParams& p, const Sm90Tiles& tiles) {
    return p.paged() && has_splits(tiles.head_dim, tiles.value_dim, tiles.ctas) && !p.alibi_slopes &&
           !p.dropout.any() && !p.batch_invariant;
}

// After so many rounds of like row tiles the last one matters little.
constexpr int64_t kManyRounds = 8;

// The most keys that a row tile sees.
int64_t visible_keys(const AttentionParams& p, const Sm90Plan& plan) {
    if (p.window_left < 0 || p.window_right < 0 || p.prefix_lens) return p.seqlen_k;
    return std::min<int64_t>(
        p.seqlen_k, int64_t{p.window_left} + p.window_right + int64_t{plan.tokens} * plan.tiles().warpgroups);
}

// Splits the keys of the row tiles behind the last whole round of the SMs, where they then take less time. If
// some row tiles have few rows, a batch of more row tiles than SMs takes the kernel for few rows instead,
// which has no splits. Where there is no such kernel it has none either: 17 chunks of 256 keys in a table
// with room for 8192 took 33 us with splits in place of 18 (H200).
void choose_splits(const AttentionParams& p, const Gpu& gpu, Sm90Plan& plan) {
    const Sm90Tiles& tiles = plan.tiles();
    const int64_t sms = gpu.num_sms, rest = plan.num_row_tiles % sms;
    if (plan.codes != Codes::none && plan.num_row_tiles > kManyRounds * sms) return;
    if (rest == 0 || !may_split(p, tiles) || (plan.few_rows && plan.num_row_tiles > sms)) return;
    const int64_t key_tiles = visible_keys(p, plan) / tiles.keys;
    int64_t shortest = key_tiles;      // in tiles of keys
    constexpr int64_t kMaxRounds = 4;  // bounds the workspace
    for (int32_t splits = 2; splits <= kMaxEvenSm90Splits && rest * splits <= kMaxRounds * sms; ++splits) {
        const int64_t combine = 3 + splits / 2;
        const int64_t time = ceil_divide(rest * splits, sms) * (ceil_divide(key_tiles, splits) + combine);
        if (time >= shortest) continue;
        shortest = time;
        plan.num_splits = splits;
    }
    if (plan.num_splits == 0) return;
    plan.num_whole = static_cast<int32_t>(plan.num_row_tiles - rest);
}

// Whether the kernel should look at the lengths, and cut the keys of long sequences where they are unlike.
// Nothing here knows them. A look that finds lengths alike has cost 3 to 5 us, and few rows, which then take
// the way of many, more over several rounds. Where the kernel with splits would not chain row tiles, long
// calls are not looked at, nor where a warp that gathers keys hands out the work: that took 3 to 8 % more. A
// launch for a part of the batch has pages for that part alone, which say nothing about its lengths.
bool looks_at_lengths(const AttentionParams& p, const Gpu& gpu, const Sm90Plan& plan) {
    const Sm90Tiles& tiles = plan.tiles();
    if (plan.codes != Codes::none || p.batch == 1 || p.most_queries > 0 || !may_split(p, tiles)) return false;
    const int64_t keys = visible_keys(p, plan);
    // Unless sequences share pages, their mean length is then at most 9/10 of what page_table has room for,
    // and of what row tiles see.
    const bool are_unlike = 9 * p.batch * keys >= 10 * p.num_pages * p.page_size;
    if (!are_unlike) {
        // How many tiles of keys an SM visits if all sequences are as long: 200 take about 340 us.
        const int64_t key_tiles = ceil_divide(keys, tiles.keys) * plan.num_row_tiles / gpu.num_sms;
        const bool unchains = tiles.chained && (!chains_splits(tiles) || p.ranges);
        if (key_tiles < 200 || unchains || plan.gathers) return false;
    }
    const bool few_rows = plan.few_rows && has_few_rows(tiles.warpgroups, tiles.ctas);
    const int64_t rounds = !few_rows ? kManyRounds : are_unlike && p.head_dim <= 128 ? 5 : 3;
    return plan.num_row_tiles <= rounds * gpu.num_sms;
}

Sm90Feature choose_feature(const AttentionParams& p, const Sm90Plan& plan) {
    if (p.dropout.any()) return Sm90Feature::dropout;
    if (p.alibi_slopes) return p.alibi_symmetric ? Sm90Feature::symmetric_alibi : Sm90Feature::alibi;
    if (p.has_tree_mask) return Sm90Feature::tree;
    if (p.ranges) return plan.may_split() ? Sm90Feature::split_ranges : Sm90Feature::ranges;
    if (plan.may_split()) return Sm90Feature::splits;
    const Sm90Tiles& tiles = plan.tiles();
    // Over codes, and where keys are gathered, one instance serves all other calls.
    if (plan.codes != Codes::none) return tiles.warpgroups == 1 ? Sm90Feature::sinks : Sm90Feature::few_rows;
    if (plan.gathers)
        return has_few_rows(tiles.warpgroups, tiles.ctas) ? Sm90Feature::few_rows : Sm90Feature::sinks;
    if (plan.few_rows && has_few_rows(tiles.warpgroups, tiles.ctas)) return Sm90Feature::few_rows;
    if (p.softcap > 0.0f) return Sm90Feature::softcap;
    if (p.sinks || p.attention_chunk.divisor > 0) return Sm90Feature::sinks;
    return Sm90Feature::none;
}

// Fills in how the work is cut, once the instance and its row tiles are chosen.
void cut_work(const AttentionParams& p, const Gpu& gpu, Sm90Plan& plan) {
    const Sm90Tiles& tiles = plan.tiles();
    const int32_t num_clusters = gpu.num_sms / tiles.ctas;
    plan.order = order_row_tiles(p, gpu, tiles.row_blocks(), tiles.ctas, plan.heads);
    if (plan.feature != Sm90Feature::beside && !plan.has_blocks()) {
        const bool has_codes = plan.codes != Codes::none;
        plan.few_rows =
            !(has_codes && tiles.warpgroups == 1) && may_have_few_rows(p, tiles, plan.heads, has_codes);
        choose_splits(p, gpu, plan);
        plan.by_length = looks_at_lengths(p, gpu, plan);
        if (plan.may_split()) plan.few_rows = false;
        plan.feature = choose_feature(p, plan);
    }
    // The row tiles whose keys are split, and the most items of work that result.
    const int64_t shared_out = plan.num_splits > 0 ? plan.num_row_tiles - plan.num_whole : 0;
    int64_t num_items = plan.num_row_tiles + shared_out * (plan.num_splits - 1);
    if (plan.by_length) num_items = plan.num_row_tiles * kMaxSm90Splits;
    plan.num_ctas = static_cast<int32_t>(tiles.ctas * std::min<int64_t>(num_items, num_clusters));
    if (plan.may_split())
        plan.split_blocks =
            static_cast<int32_t>(std::min<int64_t>(ceil_divide(p.seqlen_q, plan.tokens), tiles.warpgroups));
    int64_t num_splits = shared_out * plan.num_splits;
    if (plan.by_length) {
        const int64_t most = std::min<int64_t>(num_items, kMostSm90SplitsACta * plan.num_ctas);
        num_splits = std::max(num_splits, most);
    }
    plan.partial_bytes =
        num_splits * plan.split_blocks * kGroupRows * (tiles.value_dim + 2) * int64_t{sizeof(float)};
    plan.num_counters = 1 + num_splits * plan.split_blocks;
}

// Whether the converters can load pages of codes.
bool can_convert(const AttentionParams& p, std::string* why_not) {
    if (!can_load_codes(p, why_not)) return false;
    const int32_t bits = std::min(bits_of(p.k_dtype), bits_of(p.v_dtype));
    if (p.head_dim * bits % 128 == 0) return true;
    refuse(why_not, "it loads 16 bytes of codes at a time, and rows of head_dim ", p.head_dim, " have ",
           p.head_dim * bits / 8, " bytes with ", bits, " bits for a number");
    return false;
}

// Whether keys can be gathered one by one.
bool can_gather(const AttentionParams& p, std::string* why_not) {
    if (p.alibi_slopes || p.ranges) {
        refuse(why_not, "no instance that gathers keys from pages of ", p.page_size, " has ",
               p.alibi_slopes ? "ALiBi" : "bidirectional_ranges");
        return false;
    }
    if (is_within_reach(p, p.dtype, p.k_outer_stride, p.k_token_stride, p.k_head_stride) &&
        is_within_reach(p, p.dtype, p.v_outer_stride, p.v_token_stride, p.v_head_stride))
        return true;
    refuse(why_not, "it gathers keys from pages of ", p.page_size,
           " with offsets that reach the 64 GB behind an array's first element, and k_pages or v_pages have "
           "elements beyond");
    return false;
}

std::string name_of_blocks(DType dtype, const Sm90BlockTiles& row) {
    return text_of("sm90_attention<", to_string(dtype), ", head_dim ", row.tiles.head_dim, ", blocks of ",
                   row.block_size, ">");
}
// Over codes, one instance serves all types of q.
std::string name_of(DType dtype, bool has_codes, const Sm90Tiles& tiles, bool gathers = false) {
    return text_of("sm90_attention<", to_string(dtype), has_codes ? " over codes" : "",
                   gathers ? " over small pages" : "", ", head_dim ", tiles.head_dim,
                   tiles.value_dim != tiles.head_dim ? text_of(", values of ", tiles.value_dim) : "", ", ",
                   kGroupRows * tiles.warpgroups, " rows", tiles.ctas > 1 ? " in pairs>" : ">");
}

const char* name_of(Sm90Feature feature) {
    switch (feature) {
        case Sm90Feature::none: break;
        case Sm90Feature::alibi: return "alibi";
        case Sm90Feature::symmetric_alibi: return "symmetric_alibi";
        case Sm90Feature::dropout: return "dropout";
        case Sm90Feature::sinks: return "sinks";
        case Sm90Feature::few_rows: return "few_rows";
        case Sm90Feature::softcap: return "softcap";
        case Sm90Feature::splits: return "splits";
        case Sm90Feature::beside: return "beside";
        case Sm90Feature::tree: return "tree";
        case Sm90Feature::ranges: return "ranges";
        case Sm90Feature::split_ranges: return "split_ranges";
        case Sm90Feature::blocks:
        case Sm90Feature::small_blocks: return "blocks";
    }
    return "none";
}

// `beside`: plans for the instance that leaves room on its SM. `row`: the row of kSm90Tiles, if it is given.
std::optional<Sm90Plan> make_plan(const AttentionParams& p, const Gpu& gpu, std::string* why_not, bool beside,
                                  std::optional<int32_t> row = {}) {
    if (!suits_sm90(p, gpu, why_not)) return std::nullopt;
    if (p.dropout.any() && p.alibi_slopes) return refuse(why_not, "no instance has both dropout and ALiBi");
    if (p.ranges && (p.alibi_slopes || p.dropout.any() || is_code(p.k_dtype))) {
        return refuse(why_not, "no instance for bidirectional_ranges has ",
                      p.alibi_slopes    ? "ALiBi"
                      : p.dropout.any() ? "dropout"
                                        : "caches of codes");
    }
    if (p.has_tree_mask && p.alibi_slopes)
        return refuse(why_not, "no instance has both a tree mask and ALiBi");
    const std::optional<Codes> codes = codes_of(p.k_dtype, p.v_dtype);
    if (!codes) {
        return refuse(why_not, "no instance reads keys of ", to_string(p.k_dtype), " with values of ",
                      to_string(p.v_dtype));
    }
    const bool has_codes = *codes != Codes::none;
    if (has_codes && p.alibi_symmetric) return refuse(why_not, "over codes ", kOneSidedAlibi);
    if (has_codes && p.head_dim_v != p.head_dim) {
        return refuse(why_not, "no instance over codes has keys of head_dim ", p.head_dim,
                      " and values of another, ", p.head_dim_v);
    }
    if (has_codes && beside) return refuse(why_not, "no instance over codes leaves room on its SM");

    Sm90Plan plan{};
    plan.dtype = p.dtype;
    plan.codes = *codes;
    // int4 is scaled key by key, whatever the strides of its scales.
    plan.token_scales = has_token_scales(p) || type_of_values(*codes) == DType::int4;
    plan.num_sequences = p.batch;
    // With a block mask, the rows of a warpgroup are of one block and one head.
    plan.heads = p.block_mask ? 1 : choose_heads(p);
    plan.tokens = kGroupRows / plan.heads;
    plan.feature = beside ? Sm90Feature::beside : Sm90Feature::none;
    if (p.block_mask) {
        const std::optional<BlockRows> rows = find_block_tiles(p);
        if (!rows) {
            return refuse(
                why_not,
                "with a block_mask its instances serve head_dim up to 128, of keys and values in equally "
                "many blocks of 64 columns, without dropout and ALiBi");
        }
        plan.row = rows->row;
        plan.block_row = rows->block_row;
        plan.feature = p.block_mask.size == 128 ? Sm90Feature::blocks : Sm90Feature::small_blocks;
    } else {
        plan.row = row         ? *row
                   : beside    ? find_tiles_beside(p)
                   : has_codes ? find_code_tiles(p, plan.heads)
                               : choose_tiles(p, gpu, plan.heads);
    }
    if (plan.row < 0 && has_codes)
        return refuse(why_not, "no instance over codes holds head_dim ", p.head_dim);
    if (plan.row < 0 && beside)
        return refuse(why_not, "no instance of head_dim ", p.head_dim, " leaves room on its SM");
    if (plan.row < 0) {
        return refuse(why_not, "no instance has keys of head_dim ", p.head_dim, " and values of ",
                      p.head_dim_v,
                      "; it has up to 256 of both where these are equally many blocks of 64 columns, and "
                      "keys of 136 to 192 with values of 72 to 128");
    }
    if (!has_codes) {
        const int32_t keys = plan.tiles().keys;
        plan.box_keys = p.paged() ? std::gcd(p.page_size, keys) : keys / plan.tiles().ctas;
        // The copy engine brings a multiple of eight keys at a time; eight of wide heads take it too long.
        const bool has_boxes = plan.box_keys % 8 == 0;
        const bool has_slow_boxes = plan.box_keys == 8 && plan.tiles().head_dim > 128;
        if (!has_boxes && beside)
            return refuse(why_not, "no instance that gathers keys leaves room on its SM");
        if (!has_boxes && !can_gather(p, why_not)) return std::nullopt;
        if (!has_boxes || (has_slow_boxes && !beside && can_gather(p, nullptr))) {
            plan.box_keys = 0;
            plan.gathers = true;
        }
    }
    const Sm90Tiles& tiles = plan.tiles();
    if (!has_codes && has_first_row_alone(p) &&
        !is_first_row(tiles.head_dim, tiles.value_dim, tiles.warpgroups, tiles.ctas)) {
        return refuse(why_not, "no instance with keys of head_dim ", tiles.head_dim, " and values of ",
                      tiles.value_dim, " has ", p.ranges ? "bidirectional_ranges" : "tree masks");
    }
    if (p.alibi_symmetric && !has_symmetric_alibi(tiles.head_dim, tiles.value_dim, tiles.ctas)) {
        return refuse(why_not, "no instance with keys of head_dim ", tiles.head_dim, " and values of ",
                      tiles.value_dim, " has symmetric ALiBi");
    }
    plan.num_row_tiles = count_row_tiles(p, tiles.row_blocks(), plan.heads);
    // If even with splits at most half of the SMs would have work, sm80_attention serves the call.
    const int32_t most_splits = may_split(p, tiles) ? kMaxEvenSm90Splits : 1;
    if (p.paged() && !p.batch_invariant && 2 * plan.num_row_tiles * most_splits <= gpu.num_sms) {
        return refuse(why_not, "it would leave most of the ", gpu.num_sms,
                      " SMs without work: ", counted(plan.num_row_tiles, "tile"), " of ",
                      kGroupRows * tiles.row_blocks(), " rows, each split over ", counted(most_splits, "CTA"),
                      " at most");
    }
    if (plan.num_row_tiles + int64_t{p.num_q_heads} * p.batch >= kMaxIndex)
        return refuse(why_not, "it counts row tiles in 32 bits, and there are ", plan.num_row_tiles);
    if (!can_move_arrays(p, !has_codes, why_not)) return std::nullopt;
    if (has_codes && !can_convert(p, why_not)) return std::nullopt;
    cut_work(p, gpu, plan);
    return plan;
}

}  // namespace

std::optional<Sm90Plan> plan_sm90_attention(const AttentionParams& p, const Gpu& gpu, std::string* why_not) {
    return make_plan(p, gpu, why_not, false);
}

std::optional<Sm90Plan> plan_sm90_attention_with(const AttentionParams& p, const Gpu& gpu, int32_t row) {
    const Sm90Tiles& tiles = kSm90Tiles[row];
    if (!holds(tiles, p) || tiles.ctas > 1) return std::nullopt;  // pairs of CTAs take no pages
    return make_plan(p, gpu, nullptr, false, row);
}

std::optional<Sm90Plan> plan_sm90_attention_beside(const AttentionParams& p, const Gpu& gpu) {
    return make_plan(p, gpu, nullptr, true);
}

Explanation describe(const Sm90Plan& plan) {
    const Sm90Tiles& tiles = plan.tiles();
    Explanation text;
    text.kernel = plan.has_blocks() ? name_of_blocks(plan.dtype, kSm90BlockTiles[plan.block_row])
                                    : name_of(plan.dtype, plan.codes != Codes::none, tiles, plan.gathers);
    text.summary =
        text_of(counted(plan.num_row_tiles, "tile"), " of ", kGroupRows * tiles.row_blocks(), " rows");
    if (plan.has_blocks())
        text.summary += text_of(", which visit the tiles of ", tiles.keys, " keys that block_mask keeps");
    if (plan.num_splits > 0) {
        if (plan.num_whole > 0) text.summary += text_of(", the last ", plan.num_row_tiles - plan.num_whole);
        text.summary += text_of(" x ", counted(plan.num_splits, "split"));
    }
    if (plan.by_length) text.summary += ", cut by length where lengths are unlike";
    text.summary += text_of(": ", counted(plan.num_ctas, "CTA"), " of ", plan.threads(), " threads");
    text.file = "src/cuda/sm90_attention/kernel.cuh";
    text.plan = {
        {"dtype", to_string(plan.dtype)},
        {"cache", name_of(plan.dtype, plan.codes)},
        {"token_scales", plan.token_scales},
        {"head_dim", tiles.head_dim},
        {"head_dim_v", tiles.value_dim},
        {"warpgroups", tiles.warpgroups},
        {"cluster", tiles.ctas},
        {"feature", name_of(plan.feature)},
        {"num_sequences", plan.num_sequences},
        {"heads", plan.heads},
        {"tokens", plan.tokens},
        {"box_keys", plan.box_keys},
        {"gathers", plan.gathers},
        {"few_rows", plan.few_rows},
        {"num_row_tiles", plan.num_row_tiles},
        {"unit_row_tiles", plan.order.unit_row_tiles},
        {"num_units", plan.order.num_units},
        {"section", plan.order.section},
        {"first_section", plan.order.first_section},
        {"num_whole", plan.num_whole},
        {"num_splits", plan.num_splits},
        {"by_length", plan.by_length},
        {"split_blocks", plan.split_blocks},
        {"num_ctas", plan.num_ctas},
        {"threads", plan.threads()},
        {"partial_bytes", plan.partial_bytes},
        {"num_counters", plan.num_counters},
        {"workspace_bytes", plan.workspace_bytes()},
    };
    return text;
}

std::vector<std::string> sm90_attention_instances() {
    std::vector<std::string> names;
    for (DType dtype : kAttentionTypes) {
        for (const Sm90Tiles& tiles : kSm90Tiles) {
            names.push_back(name_of(dtype, false, tiles));
            if (tiles.ctas == 1) names.push_back(name_of(dtype, false, tiles, true));
        }
        for (const Sm90Tiles& tiles : kSm90CodeTiles) names.push_back(name_of(dtype, true, tiles));
        for (const Sm90BlockTiles& row : kSm90BlockTiles) names.push_back(name_of_blocks(dtype, row));
    }
    return names;
}

}  // namespace octavo::cuda
