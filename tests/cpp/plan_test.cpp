// Which kernel serves which call, and how it cuts the work: pure functions, which need no GPU.
#include "cuda/attention/plan.h"
#include "checks/checks.h"
#include "cuda/backend.h"
#include "cuda/gpu.h"

#include <octavo/explain.h>

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <initializer_list>
#include <iterator>
#include <map>
#include <new>
#include <random>
#include <set>
#include <string>
#include <variant>
#include <vector>

// Counted, since a call may not allocate to make its plan.
static std::atomic<int64_t> num_allocations{0};
void* operator new(std::size_t bytes) {
    ++num_allocations;
    if (void* const memory = std::malloc(bytes)) return memory;
    throw std::bad_alloc();
}
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, std::size_t) noexcept { std::free(memory); }

namespace octavo {
namespace {

using cuda::AttentionPlan;
using cuda::Gpu;
using cuda::KernelPlan;

// Arrays of shapes alone, each at an address of its own that is a multiple of 4096.
class Arrays {
  public:
    TensorView make(DType dtype, std::initializer_list<int64_t> shape) {
        address_ += uintptr_t{1} << 46;
        return {reinterpret_cast<void*>(address_), dtype, shape, {DeviceType::meta, 0}};
    }

  private:
    uintptr_t address_ = 0;
};

struct Shape {
    int64_t batch = 1, keys = 1024;  // of each sequence at most
    int64_t num_kv_heads = 8, group_size = 4, head_dim = 128;
    int64_t page_size = 16;  // paged
    int64_t queries = 1;     // of each sequence at most; more than one are packed where keys are paged
    int64_t total_q = 0;     // packed; 0: batch * queries
    DType dtype = DType::bfloat16;
};

PagedAttentionArgs paged(const Shape& shape) {
    Arrays arrays;
    const int64_t max_pages = (shape.keys + shape.page_size - 1) / shape.page_size;
    const int64_t total_q = shape.total_q > 0 ? shape.total_q : shape.batch * shape.queries;
    const int64_t num_q_heads = shape.num_kv_heads * shape.group_size;
    PagedAttentionArgs args;
    args.q = arrays.make(shape.dtype, {total_q, num_q_heads, shape.head_dim});
    args.out = arrays.make(shape.dtype, {total_q, num_q_heads, shape.head_dim});
    for (TensorView* pages : {&args.k_pages, &args.v_pages}) {
        *pages = arrays.make(shape.dtype,
                             {shape.batch * max_pages, shape.page_size, shape.num_kv_heads, shape.head_dim});
    }
    args.page_table = arrays.make(DType::int32, {shape.batch, max_pages});
    args.seq_lens = arrays.make(DType::int32, {shape.batch});
    if (shape.queries > 1 || shape.total_q > 0) {
        args.cu_seqlens_q = arrays.make(DType::int32, {shape.batch + 1});
        args.max_seqlen_q = shape.queries;
    }
    return args;
}

AttentionArgs dense(const Shape& shape) {
    Arrays arrays;
    const int64_t num_q_heads = shape.num_kv_heads * shape.group_size;
    AttentionArgs args;
    args.q = arrays.make(shape.dtype, {shape.batch, shape.queries, num_q_heads, shape.head_dim});
    args.out = arrays.make(shape.dtype, {shape.batch, shape.queries, num_q_heads, shape.head_dim});
    args.k = arrays.make(shape.dtype, {shape.batch, shape.keys, shape.num_kv_heads, shape.head_dim});
    args.v = arrays.make(shape.dtype, {shape.batch, shape.keys, shape.num_kv_heads, shape.head_dim});
    args.causal = true;
    return args;
}

AttentionArgs packed(const Shape& shape) {
    Arrays arrays;
    const int64_t total_q = shape.total_q > 0 ? shape.total_q : shape.batch * shape.queries;
    const int64_t num_q_heads = shape.num_kv_heads * shape.group_size;
    AttentionArgs args;
    args.q = arrays.make(shape.dtype, {total_q, num_q_heads, shape.head_dim});
    args.out = arrays.make(shape.dtype, {total_q, num_q_heads, shape.head_dim});
    args.k = arrays.make(shape.dtype, {shape.batch * shape.keys, shape.num_kv_heads, shape.head_dim});
    args.v = arrays.make(shape.dtype, {shape.batch * shape.keys, shape.num_kv_heads, shape.head_dim});
    args.cu_seqlens_q = arrays.make(DType::int32, {shape.batch + 1});
    args.cu_seqlens_k = arrays.make(DType::int32, {shape.batch + 1});
    args.max_seqlen_q = shape.queries;
    args.max_seqlen_k = shape.keys;
    args.causal = true;
    return args;
}

AttentionParams checked(const AttentionArgs& args) { return check_attention(args); }
AttentionParams checked(const PagedAttentionArgs& args) { return check_paged_attention(args); }

template <class Args>
AttentionPlan plan_of(const Args& args, const char* gpu = "h200") {
    return cuda::plan_attention(checked(args), *cuda::find_gpu(gpu));
}

// Its kernel, without the instance.
template <class Args>
std::string kind_of(const Args& args, const char* gpu = "h200") {
    const std::string kernel = explain(args, gpu).kernel;
    return kernel.substr(0, kernel.find('<'));
}

std::string text_of(const PlanValue& value) {
    struct Text {
        std::string operator()(bool x) const { return x ? "true" : "false"; }
        std::string operator()(int64_t x) const { return std::to_string(x); }
        std::string operator()(const std::string& x) const { return x; }
    };
    return std::visit(Text{}, value);
}

std::string field(const Explanation& explanation, const std::string& name) {
    for (const auto& [key, value] : explanation.plan) {
        if (key == name) return text_of(value);
    }
    return "no " + name;
}

TEST(Plan, DecodeKernels) {
    Shape shape;
    EXPECT_EQ(kind_of(paged(shape)), "split_kv_decode");  // one sequence
    EXPECT_EQ(field(explain(paged(shape), "h200"), "policy"), "even");
    shape.batch = 4;
    shape.keys = 20000;
    EXPECT_EQ(kind_of(paged(shape)), "split_kv_decode");  // few sequences
    EXPECT_EQ(field(explain(paged(shape), "h200"), "policy"), "by_length");
    shape.batch = 64;
    EXPECT_EQ(kind_of(paged(shape)), "stream_k_decode");
    shape.batch = 400;
    shape.keys = 512;
    EXPECT_EQ(kind_of(paged(shape)), "split_kv_decode");  // many items
    EXPECT_EQ(field(explain(paged(shape), "h200"), "items"), "many");
    shape.batch = 16;
    shape.keys = 128;
    EXPECT_EQ(kind_of(paged(shape)), "split_kv_decode");  // short ones
    EXPECT_EQ(field(explain(paged(shape), "h200"), "items"), "short");
}

TEST(Plan, DecodeWithMasks) {
    const Shape shape{1, 4096};
    PagedAttentionArgs args = paged(shape);
    args.window_left = 256;
    EXPECT_EQ(kind_of(args), "stream_k_decode");
    args.batch_invariant = true;
    EXPECT_EQ(kind_of(args), "batch_invariant_decode");
    args = paged(shape);
    args.prefix_lens = Arrays().make(DType::int32, {1});
    EXPECT_EQ(kind_of(args), "stream_k_decode");
    args = paged(shape);
    args.causal = false;
    args.softcap = 20.0;
    EXPECT_EQ(kind_of(args), "split_kv_decode");
}

TEST(Plan, BatchInvariantDecode) {
    PagedAttentionArgs args = paged({64, 4096});
    args.batch_invariant = true;
    EXPECT_EQ(kind_of(args), "split_kv_decode");
    EXPECT_EQ(field(explain(args, "h200"), "policy"), "fixed");
    args = paged({400, 20000});  // room for more splits than are worth a CTA each
    args.batch_invariant = true;
    EXPECT_EQ(kind_of(args), "batch_invariant_decode");
}

TEST(Plan, ManyQueries) {
    Shape shape{4, 2048};
    shape.queries = 2048;
    EXPECT_EQ(kind_of(dense(shape)), "sm90_attention");
    EXPECT_EQ(kind_of(packed(shape)), "sm90_attention");
    EXPECT_EQ(kind_of(paged(shape)), "sm90_attention");
    EXPECT_EQ(kind_of(dense(shape), "a100"), "sm80_attention");
    EXPECT_EQ(kind_of(dense(shape), "b200"), "sm80_attention");
    shape.queries = 20;  // verifies drafts
    EXPECT_EQ(field(explain(paged(shape), "h200"), "feature"), "splits");
    shape.page_size = 5;
    EXPECT_EQ(kind_of(paged(shape)), "sm80_attention");
}

TEST(Plan, StridesAndAddresses) {
    Shape shape{4, 2048};
    shape.queries = 2048;
    AttentionArgs many = dense(shape);
    many.k.strides = {2048 * 8 * 129, 8 * 129, 129, 1};
    EXPECT_EQ(kind_of(many), "sm80_attention");
    many = dense(shape);
    many.v.data = static_cast<char*>(many.v.data) + 8;
    EXPECT_EQ(kind_of(many), "sm80_attention");
    PagedAttentionArgs few = paged({64, 2048});
    few.q.data = static_cast<char*>(few.q.data) + 2;
    EXPECT_EQ(kind_of(few), "sm80_attention");
    few = paged({64, 2048});  // a head-major cache
    few.k_pages.strides = few.v_pages.strides = {8 * 16 * 128, 128, 16 * 128, 1};
    EXPECT_EQ(kind_of(few), "stream_k_decode");
}

TEST(Plan, OptionsThatNameAKernel) {
    PagedAttentionArgs args = paged({64, 2048});
    args.num_splits = 3;
    EXPECT_EQ(kind_of(args), "sm80_attention");
    EXPECT_EQ(field(explain(args, "h200"), "num_splits"), "3");
    args = paged({64, 8192});
    args.shared_prefix_len = 4096;
    EXPECT_EQ(kind_of(args), "shared_prefix");
    EXPECT_EQ(field(explain(args, "h200"), "num_runs"), "8");
    Shape shape{4, 2048};
    shape.queries = 2048;
    AttentionArgs dropout = dense(shape);
    dropout.dropout_p = 0.1;
    dropout.dropout_seed = 1;
    EXPECT_EQ(field(explain(dropout, "h200"), "feature"), "dropout");
    dropout.alibi_slopes = Arrays().make(DType::float32, {32});
    EXPECT_EQ(kind_of(dropout), "sm80_attention");
}

TEST(Plan, NothingToDo) {
    Shape shape{2, 64};
    AttentionArgs args = dense(shape);
    args.q.shape[1] = args.out.shape[1] = 0;
    EXPECT_TRUE(std::holds_alternative<cuda::NothingToDo>(plan_of(args)));
    EXPECT_EQ(kind_of(args), "none");
}

TEST(Plan, MoreSequencesThanALaunchTakes) {
    const AttentionParams p = checked(paged({2500, 4096}));
    const KernelPlan first = cuda::plan_kernel(p, *cuda::find_gpu("h100"));
    EXPECT_TRUE(std::holds_alternative<cuda::StreamKPlan>(first));
    EXPECT_EQ(cuda::num_sequences(first), cuda::kMaxDecodeBatch);
    EXPECT_NE(explain(paged({2500, 4096}), "h100").summary.find("for the first 1024 of 2500 sequences"),
              std::string::npos);
    AttentionParams rest = p;
    rest.batch -= 2 * cuda::kMaxDecodeBatch;
    const KernelPlan last = cuda::plan_kernel(rest, *cuda::find_gpu("h100"));
    EXPECT_EQ(cuda::num_sequences(last), rest.batch);
}

// ---- random problems

class Random {
  public:
    explicit Random(unsigned seed) : engine_(seed) {}
    int64_t pick(std::initializer_list<int64_t> choices) {
        return choices.begin()[engine_() % choices.size()];
    }
    bool one_in(unsigned n) { return engine_() % n == 0; }
    int64_t up_to(int64_t n) { return 1 + static_cast<int64_t>(engine_() % n); }

  private:
    std::mt19937 engine_;
};

Shape random_shape(Random& random) {
    Shape shape;
    shape.dtype = random.one_in(2) ? DType::float16 : DType::bfloat16;
    shape.head_dim = random.one_in(4) ? 8 * random.up_to(32) : random.pick({64, 96, 128, 128, 192, 256});
    shape.num_kv_heads = random.one_in(8) ? random.up_to(200) : random.pick({1, 2, 4, 8, 8, 16});
    shape.group_size = random.one_in(8) ? random.up_to(64) : random.pick({1, 2, 3, 4, 5, 8, 8, 16});
    shape.batch =
        random.one_in(8) ? random.up_to(3000) : random.pick({1, 1, 2, 3, 8, 20, 32, 33, 64, 150, 256});
    shape.keys =
        random.one_in(3) ? random.up_to(40000) : random.pick({16, 100, 200, 512, 640, 1024, 2048, 8192});
    shape.page_size = random.one_in(6) ? random.up_to(300) : random.pick({1, 8, 16, 16, 32, 64, 128, 256});
    return shape;
}

PagedAttentionArgs random_paged(Random& random, bool batch_invariant) {
    Shape shape = random_shape(random);
    if (random.one_in(2)) {
        shape.queries = random.one_in(2) ? random.up_to(16) : random.pick({64, 128, 200, 500, 2048});
        if (shape.queries > 16) shape.batch = std::min<int64_t>(shape.batch, 64);
        shape.total_q =
            random.one_in(2) ? shape.batch * shape.queries : random.up_to(shape.batch * shape.queries);
    }
    PagedAttentionArgs args = paged(shape);
    args.causal = !random.one_in(4);
    args.batch_invariant = batch_invariant;
    if (random.one_in(5)) args.window_left = random.pick({0, 100, 1000, 4000});
    if (random.one_in(6)) args.prefix_lens = Arrays().make(DType::int32, {shape.batch});
    if (random.one_in(6)) {
        args.alibi_slopes = Arrays().make(DType::float32, {shape.num_kv_heads * shape.group_size});
    } else if (!batch_invariant && args.window_left < 0 && random.one_in(6)) {
        args.shared_prefix_len = (shape.keys / 2 / shape.page_size) * shape.page_size;
    }
    if (random.one_in(12)) args.num_splits = random.up_to(40);
    return args;
}

AttentionArgs random_dense_or_packed(Random& random) {
    Shape shape = random_shape(random);
    shape.batch = std::min<int64_t>(shape.batch, 200);
    shape.queries =
        random.one_in(3) ? random.up_to(5000) : random.pick({1, 64, 128, 192, 200, 512, 1024, 4096});
    const bool is_packed = random.one_in(2);
    if (is_packed && random.one_in(2)) shape.total_q = random.up_to(shape.batch * shape.queries);
    AttentionArgs args = is_packed ? packed(shape) : dense(shape);
    args.causal = !random.one_in(3);
    if (random.one_in(5)) args.window_left = random.pick({0, 100, 1000, 4000});
    if (random.one_in(5))
        args.alibi_slopes = Arrays().make(DType::float32, {shape.num_kv_heads * shape.group_size});
    if (random.one_in(5)) {
        args.dropout_p = 0.1;
        args.dropout_seed = 1;
    }
    return args;
}

const char* const kGpus[] = {"a100", "l40s", "h100", "h200", "b200", "rtx5090"};

// What every launch has to hold.
void expect_launchable(const KernelPlan& plan, const AttentionParams& p, const Gpu& gpu) {
    const cuda::Grid grid = std::visit([](const auto& plan) { return plan.grid(); }, plan);
    EXPECT_GE(std::min({grid.x, grid.y, grid.z}), 1);
    EXPECT_LT(grid.x, int64_t{1} << 31);
    EXPECT_LT(std::max(grid.y, grid.z), 1 << 16);
    EXPECT_GE(cuda::num_sequences(plan), 1);
    EXPECT_LE(cuda::num_sequences(plan), p.batch);
    EXPECT_GE(std::visit([](const auto& plan) { return plan.workspace_bytes(); }, plan), 0);
    EXPECT_TRUE(plan == cuda::plan_kernel(p, gpu)) << "the same problem again";
}

void expect_sound(const cuda::SplitKvPlan& plan, const AttentionParams& p, const Gpu& gpu) {
    const int64_t items = int64_t{plan.num_sequences} * plan.num_kv_heads;
    EXPECT_GE(plan.num_splits, 1);
    EXPECT_EQ(plan.num_splits > 1, plan.combiners_per_item > 0);
    EXPECT_EQ(plan.num_splits > 1, plan.partial_words > 0);
    EXPECT_EQ(plan.policy == cuda::SplitPolicy::fixed, p.batch_invariant);
    if (plan.policy == cuda::SplitPolicy::by_length) {
        EXPECT_LE(plan.num_sequences, cuda::kMaxSequencesByLength);
        EXPECT_GE(plan.num_slots, plan.num_sequences);
        EXPECT_LE(plan.num_slots, plan.num_sequences * plan.num_splits);
    } else {
        EXPECT_EQ(plan.num_slots, plan.num_sequences * plan.num_splits);
    }
    if (plan.num_splits == 1) return;
    const int64_t most = plan.policy == cuda::SplitPolicy::fixed
                             ? std::max<int64_t>(64 * gpu.num_sms, items * 32)
                             : gpu.num_sms;
    EXPECT_LE(int64_t{plan.num_kv_heads} * plan.num_slots, most) << "the workspace is not bounded by the SMs";
}

void expect_sound(const cuda::BatchInvariantDecodePlan& plan, const AttentionParams& p, const Gpu& gpu) {
    EXPECT_TRUE(p.batch_invariant);
    EXPECT_LE(plan.num_ctas, gpu.num_sms);
    EXPECT_LE(plan.workspace_words, int64_t{gpu.num_sms} * plan.num_rows * 32 * 260);
}

void expect_sound(const cuda::StreamKPlan& plan, const AttentionParams& p, const Gpu& gpu) {
    EXPECT_FALSE(p.batch_invariant);
    EXPECT_LE(plan.num_ctas, gpu.num_sms);
    EXPECT_LE(plan.workspace_bytes(), int64_t{gpu.num_sms} * 16 * (2 * 260 + 1) * 4);
}

void expect_sound(const cuda::Sm90Plan& plan, const AttentionParams& p, const Gpu& gpu) {
    EXPECT_EQ(gpu.compute_capability, 90);
    EXPECT_EQ(p.group_size() % plan.heads, 0);
    EXPECT_LE(plan.heads * plan.tokens, 64);
    EXPECT_LE(plan.num_ctas, gpu.num_sms);
    EXPECT_EQ(plan.num_ctas % plan.tiles().ctas, 0);
    EXPECT_EQ(plan.tiles().keys % plan.box_keys, 0);
    EXPECT_GE(plan.first_section, 1);
    EXPECT_LE(plan.first_section, plan.section);
    EXPECT_EQ((plan.num_units - plan.first_section) % plan.section, 0)
        << "sections after the first are whole";
    if (!p.cu_seqlens_q) {
        const int64_t unit_rows = int64_t{plan.unit_row_tiles} * plan.tiles().row_blocks() * plan.tokens;
        EXPECT_EQ(int64_t{plan.num_units} * plan.unit_row_tiles, plan.num_row_tiles);
        EXPECT_GE(unit_rows, p.seqlen_q) << "some queries have no row tile";
    }
    EXPECT_GE(plan.num_row_tiles * plan.tiles().row_blocks() * plan.tokens * plan.heads,
              p.total_q * p.num_q_heads)
        << "some queries have no row tile";
    EXPECT_EQ(plan.num_splits > 0, plan.feature == cuda::Sm90Feature::splits);
    if (plan.num_splits == 0) {
        EXPECT_EQ(plan.partial_bytes, 0);
        return;
    }
    EXPECT_TRUE(p.paged() && !p.batch_invariant) << "only there may bits depend on the batch";
    EXPECT_EQ(plan.num_whole % gpu.num_sms, 0);
    EXPECT_LE((plan.num_row_tiles - plan.num_whole) * plan.num_splits, 4 * gpu.num_sms);
}

void expect_sound(const cuda::Sm80Plan& plan, const AttentionParams& p, const Gpu& gpu) {
    EXPECT_GE(plan.tiles().head_dim, p.head_dim);
    EXPECT_GE(int64_t{plan.num_row_tiles} * plan.tiles().rows(), p.total_q * p.group_size())
        << "some queries have no row tile";
    EXPECT_GE(gpu.shared_bytes_per_block, static_cast<int64_t>(cuda::sm80_shared_bytes(plan.tiles().stages)));
    EXPECT_EQ(plan.workspace_bytes() > 0, plan.num_splits > 1);
    if (p.num_splits > 0) {
        EXPECT_EQ(plan.num_splits, p.num_splits);
    } else {
        EXPECT_TRUE(plan.num_splits == 1 || (p.paged() && !p.batch_invariant))
            << "only there may bits depend on the batch";
        EXPECT_TRUE(plan.num_splits == 1 || plan.grid().size() <= 2 * gpu.num_sms);
    }
}

// The plans of all launches of a call.
std::vector<KernelPlan> launches_of(const AttentionParams& params, const Gpu& gpu) {
    std::vector<KernelPlan> plans;
    const AttentionPlan plan = cuda::plan_attention(params, gpu);
    if (const auto* shared = std::get_if<cuda::SharedPrefixPlan>(&plan)) {
        EXPECT_EQ(shared->num_runs, (params.shared_prefix_len - 1) / shared->run_len + 1);
        EXPECT_EQ(shared->run_len % params.page_size, 0);
        EXPECT_LE(shared->num_runs, cuda::kMaxPrefixRuns);
        EXPECT_TRUE(plan == cuda::plan_attention(params, gpu)) << "the same problem again";
        return {shared->over_prefix, shared->behind_prefix};
    }
    if (std::holds_alternative<cuda::NothingToDo>(plan)) return {};
    for (AttentionParams p = params; p.batch > 0; p.batch -= cuda::num_sequences(plans.back())) {
        plans.push_back(cuda::plan_kernel(p, gpu));
        expect_launchable(plans.back(), p, gpu);
        std::visit([&](const auto& plan) { expect_sound(plan, p, gpu); }, plans.back());
        if (testing::Test::HasFailure()) break;
    }
    return plans;
}

template <class Args>
std::vector<KernelPlan> launches_of(const Args& args, const char* gpu) {
    return launches_of(checked(args), *cuda::find_gpu(gpu));
}

// What an instance is made of, all that has a kernel of its own.
std::string kernel_of(const KernelPlan& plan) {
    const Explanation text = cuda::describe(plan);
    std::string name = text.kernel;
    if (std::holds_alternative<cuda::SplitKvPlan>(plan))
        name += " " + field(text, "policy") + " " + field(text, "items");
    if (std::holds_alternative<cuda::Sm90Plan>(plan)) name += " " + field(text, "feature");
    if (std::holds_alternative<cuda::Sm80Plan>(plan)) name += " dropout " + field(text, "dropout");
    return name;
}

// All kernels that are compiled.
std::set<std::string> all_kernels() {
    std::set<std::string> names;
    auto add = [&names](auto plan, DType dtype, size_t row) {
        plan.dtype = dtype;
        plan.row = static_cast<int32_t>(row);
        names.insert(kernel_of(plan));
    };
    auto add_split_kv = [&add](cuda::SplitPolicy policy, cuda::SplitKvItems items, DType dtype, size_t row) {
        cuda::SplitKvPlan plan{};
        plan.policy = policy;
        plan.items = items;
        add(plan, dtype, row);
    };
    for (DType dtype : cuda::kAttentionTypes) {
        for (size_t row = 0; row < std::size(cuda::kDecodeTiles); ++row) {
            const cuda::DecodeTiles& tiles = cuda::kDecodeTiles[row];
            const bool has_short_items = tiles.row_tiles == 1 && tiles.head_dim <= 128;
            using cuda::SplitKvItems, cuda::SplitPolicy;
            add_split_kv(SplitPolicy::even, SplitKvItems::long_items, dtype, row);
            if (has_short_items) add_split_kv(SplitPolicy::even, SplitKvItems::short_items, dtype, row);
            add_split_kv(SplitPolicy::even, SplitKvItems::many_items, dtype, row);
            add_split_kv(SplitPolicy::by_length, SplitKvItems::long_items, dtype, row);
            add_split_kv(SplitPolicy::fixed, SplitKvItems::long_items, dtype, row);
            add_split_kv(SplitPolicy::fixed, SplitKvItems::short_items, dtype, row);
            add(cuda::StreamKPlan{}, dtype, row);
            add(cuda::BatchInvariantDecodePlan{}, dtype, row);
        }
        for (size_t row = 0; row < std::size(cuda::kSm90Tiles); ++row) {
            const cuda::Sm90Tiles& tiles = cuda::kSm90Tiles[row];
            cuda::Sm90Plan plan{};
            for (auto feature :
                 {cuda::Sm90Feature::none, cuda::Sm90Feature::alibi, cuda::Sm90Feature::dropout,
                  cuda::Sm90Feature::few_rows, cuda::Sm90Feature::splits}) {
                if (feature == cuda::Sm90Feature::few_rows &&
                    !cuda::has_few_rows(tiles.warpgroups, tiles.ctas))
                    continue;
                if (feature == cuda::Sm90Feature::splits && !cuda::has_splits(tiles.ctas)) continue;
                plan.feature = feature;
                add(plan, dtype, row);
            }
        }
        for (size_t row = 0; row < std::size(cuda::kSm80Tiles); ++row) {
            cuda::Sm80Plan plan{};
            for (bool dropout : {false, true}) {
                plan.dropout = dropout;
                add(plan, dtype, row);
            }
        }
    }
    return names;
}

TEST(RandomPlans, AreSoundAndReachEveryKernel) {
    std::set<std::string> unreached = all_kernels();
    size_t num_plans = 0;
    for (unsigned seed = 0; seed < 20000 && !HasFailure(); ++seed) {
        SCOPED_TRACE(seed);
        Random random(seed);
        const bool is_paged = !random.one_in(3);
        const AttentionParams p = is_paged ? checked(random_paged(random, random.one_in(3)))
                                           : checked(random_dense_or_packed(random));
        for (const char* gpu : kGpus) {
            SCOPED_TRACE(gpu);
            for (const KernelPlan& plan : launches_of(p, *cuda::find_gpu(gpu))) {
                ++num_plans;
                unreached.erase(kernel_of(plan));
            }
        }
    }
    EXPECT_GT(num_plans, 100000u);
    EXPECT_EQ(unreached, std::set<std::string>());
}

// The folder of a kernel: kernels of one folder give a sequence the same bits where these do not depend on
// the batch.
std::string family_of(const KernelPlan& plan) {
    if (std::holds_alternative<cuda::Sm90Plan>(plan)) return "sm90_attention";
    return std::holds_alternative<cuda::Sm80Plan>(plan) ? "sm80_attention" : "decode";
}

// What decides on the bits of a sequence, besides its own length.
std::string bits_of(const KernelPlan& plan) {
    if (const auto* split_kv = std::get_if<cuda::SplitKvPlan>(&plan))
        return "decode " + std::to_string(split_kv->row) + " " +
               std::to_string(split_kv->max_fixed_splits_log2);
    if (const auto* decode = std::get_if<cuda::BatchInvariantDecodePlan>(&plan)) {
        // In two kernels, the splits of which are those of the number of KV heads.
        int32_t log2 = 0;
        while (log2 < 5 && (2 << log2) * decode->num_kv_heads <= 128) ++log2;
        return "decode " + std::to_string(decode->row) + " " + std::to_string(log2);
    }
    if (const auto* sm90 = std::get_if<cuda::Sm90Plan>(&plan))
        return "sm90 " + std::to_string(sm90->row) + " " + std::to_string(sm90->heads);
    const auto& sm80 = std::get<cuda::Sm80Plan>(plan);
    return "sm80 " + std::to_string(sm80.row) + " " + std::to_string(sm80.num_splits);
}

TEST(RandomPlans, BatchInvariantOnesDoNotDependOnTheBatch) {
    std::map<std::string, int> met;
    for (unsigned seed = 0; seed < 3000 && !HasFailure(); ++seed) {
        SCOPED_TRACE(seed);
        Random random(seed);
        PagedAttentionArgs args = random_paged(random, true);
        args.num_splits.reset();
        for (const char* gpu : {"a100", "h200"}) {
            const std::vector<KernelPlan> batch = launches_of(args, gpu);
            if (HasFailure()) return;
            ++met[family_of(batch.front())];
            PagedAttentionArgs alone = args;  // the first sequence, with less room in its table
            alone.page_table.shape[0] = alone.seq_lens.shape[0] = 1;
            alone.page_table.shape[1] = (alone.page_table.shape[1] + 1) / 2;
            if (alone.prefix_lens) alone.prefix_lens->shape[0] = 1;
            const int64_t queries = args.max_seqlen_q.value_or(1);
            alone.q.shape[0] = alone.out.shape[0] = std::min(queries, args.q.shape[0]);
            if (alone.cu_seqlens_q) alone.cu_seqlens_q->shape[0] = 2;
            const std::vector<KernelPlan> one = launches_of(alone, gpu);
            ASSERT_EQ(one.size(), 1u);
            for (const KernelPlan& plan : batch) EXPECT_EQ(bits_of(plan), bits_of(one[0])) << gpu;
        }
    }
    EXPECT_GT(met["decode"], 1000);
    EXPECT_GT(met["sm90_attention"], 300);
    EXPECT_GT(met["sm80_attention"], 300);
}

TEST(RandomPlans, AttentionDoesNotDependOnTheBatch) {
    for (unsigned seed = 0; seed < 2000 && !HasFailure(); ++seed) {
        SCOPED_TRACE(seed);
        Random random(seed);
        AttentionArgs args = random_dense_or_packed(random);
        AttentionArgs alone = args;
        const bool is_packed = args.cu_seqlens_q.has_value();
        for (TensorView* array : {&alone.q, &alone.out})
            array->shape[0] = is_packed ? std::min(*args.max_seqlen_q, args.q.shape[0]) : 1;
        for (TensorView* array : {&alone.k, &alone.v}) array->shape[0] = is_packed ? *args.max_seqlen_k : 1;
        if (is_packed) alone.cu_seqlens_q->shape[0] = alone.cu_seqlens_k->shape[0] = 2;
        if (is_packed && args.q.shape[0] < *args.max_seqlen_q) continue;  // the bound is that of the total
        for (const char* gpu : {"a100", "h200"}) {
            const auto batch = launches_of(args, gpu), one = launches_of(alone, gpu);
            ASSERT_EQ(one.size(), 1u);
            EXPECT_EQ(bits_of(batch.at(0)), bits_of(one[0])) << gpu;
        }
    }
}

TEST(RandomPlans, DependOnAddressesByTheirAlignmentAlone) {
    for (unsigned seed = 0; seed < 1000 && !HasFailure(); ++seed) {
        SCOPED_TRACE(seed);
        Random random(seed);
        PagedAttentionArgs args = random_paged(random, random.one_in(3));
        const AttentionPlan plan = plan_of(args);
        for (TensorView* array : {&args.q, &args.out, &args.k_pages, &args.v_pages})
            array->data = static_cast<char*>(array->data) + 16 * random.up_to(1000);
        EXPECT_TRUE(plan_of(args) == plan);
    }
}

TEST(RandomPlans, AreMadeWithoutAllocating) {
    for (unsigned seed = 0; seed < 2000 && !HasFailure(); ++seed) {
        SCOPED_TRACE(seed);
        Random random(seed);
        const AttentionParams p = random.one_in(2) ? checked(random_paged(random, random.one_in(3)))
                                                   : checked(random_dense_or_packed(random));
        for (const char* name : kGpus) {
            const Gpu& gpu = *cuda::find_gpu(name);
            const int64_t before = num_allocations;
            const AttentionPlan plan = cuda::plan_attention(p, gpu);
            EXPECT_EQ(num_allocations, before) << name;
            cuda::explain(p, gpu);
            EXPECT_GT(num_allocations, before) << "nothing is counted";
        }
    }
}

// ---- explain

TEST(Explain, NamesOneKernelAndWhyNotTheOthers) {
    for (unsigned seed = 0; seed < 500; ++seed) {
        Random random(seed);
        const Explanation text = explain(random_paged(random, random.one_in(3)), "h100");
        EXPECT_FALSE(text.kernel.empty() || text.summary.empty() || text.plan.empty());
        std::set<std::string> kernels{text.kernel.substr(0, text.kernel.find('<'))};
        for (const auto& [kernel, reason] : text.why_not) {
            EXPECT_TRUE(kernels.insert(kernel).second) << kernel;
            EXPECT_GE(reason.size(), 15u) << kernel << ": " << reason;
        }
        EXPECT_EQ(kernels,
                  (std::set<std::string>{"shared_prefix", "split_kv_decode", "batch_invariant_decode",
                                         "stream_k_decode", "sm90_attention", "sm80_attention"}));
    }
}

TEST(Explain, KernelsAreThoseOfTheInstances) {
    const std::vector<std::string> instances = cuda::attention_instances(true);
    const std::set<std::string> names(instances.begin(), instances.end());
    EXPECT_EQ(names.size(), instances.size());
    for (unsigned seed = 0; seed < 200; ++seed) {
        Random random(seed);
        EXPECT_EQ(names.count(explain(random_dense_or_packed(random), "h100").kernel), 1u);
    }
}

TEST(Explain, WritesItsReasons) {
    Shape shape{1, 2048};
    shape.queries = 5;
    const std::string text = explain(paged(shape), "a100").to_string();
    EXPECT_EQ(
        text,
        "sm80_attention<bfloat16, head_dim 128, 1 stage>: 1 tile of 128 rows x 8 KV heads x 8 splits: 64 "
        "CTAs of 128 threads; then combine_splits_kernel (src/cuda/sm80_attention/kernel.cuh)\n"
        "  not shared_prefix: shared_prefix_len is 0\n"
        "  not split_kv_decode: it takes at most 16 rows a KV head for head_dim 128, and these are 20: 5 "
        "query "
        "tokens of 4 query heads\n"
        "  not batch_invariant_decode: its splits are those of batch_invariant, which is not given\n"
        "  not stream_k_decode: it takes at most 16 rows a KV head for head_dim 128, and these are 20: 5 "
        "query "
        "tokens of 4 query heads\n"
        "  not sm90_attention: it consists of instructions that only sm_90a has, and this GPU is sm_80");
}

TEST(Explain, OtherOperators) {
    Arrays arrays;
    AppendKvArgs append;
    append.k = arrays.make(DType::bfloat16, {64, 8, 128});
    append.v = arrays.make(DType::bfloat16, {64, 8, 128});
    append.k_pages = arrays.make(DType::bfloat16, {100, 16, 8, 128});
    append.v_pages = arrays.make(DType::bfloat16, {100, 16, 8, 128});
    append.page_table = arrays.make(DType::int32, {64, 8});
    append.seq_lens = arrays.make(DType::int32, {64});
    Explanation text = explain(append, "a100");
    EXPECT_EQ(text.kernel, "append_kv_kernel<bfloat16>");
    EXPECT_EQ(field(text, "in_chunks"), "true");
    EXPECT_EQ(field(text, "num_ctas"), "16");
    append.k_scale = 0.5f;
    EXPECT_EQ(field(explain(append, "a100"), "in_chunks"), "false");
    CopyPagesArgs copy;
    copy.k_pages = append.k_pages;
    copy.v_pages = append.v_pages;
    copy.copies = arrays.make(DType::int32, {3, 2});
    EXPECT_EQ(field(explain(copy, "a100"), "num_rows"), std::to_string(3 * 16 * 8));
    MergeStatesArgs merge;
    merge.out_a = merge.out_b = merge.out = append.k;
    merge.lse_a = merge.lse_b = merge.lse = arrays.make(DType::float32, {64, 8});
    EXPECT_EQ(explain(merge, "sm_80").kernel, "merge_states_kernel<bfloat16>");
}

TEST(Explain, Devices) {
    const PagedAttentionArgs args = paged({});
    EXPECT_EQ(kind_of(args, "cpu"), "cpu_attention");
    for (const std::string& gpu : explainable_gpus())
        EXPECT_EQ(explain(args, gpu).plan[0].first, "dtype") << gpu;
    EXPECT_EQ(explain(args, "sm_90").to_string(), explain(args, "h100").to_string());
    EXPECT_THROW(explain(args), ValueError);  // the device of shapes
    EXPECT_THROW(explain(args, "sm_75"), ValueError);
    EXPECT_THROW(explain(args, "cuda:x"), ValueError);
    EXPECT_THROW(paged_attention(args), DeviceError);
}

TEST(Explain, NullAddressesWillDo) {
    PagedAttentionArgs args = paged({64, 1024});
    const Explanation text = explain(args, "h100");
    for (TensorView* array :
         {&args.q, &args.out, &args.k_pages, &args.v_pages, &args.page_table, &args.seq_lens})
        array->data = nullptr;
    EXPECT_EQ(explain(args, "h100").to_string(), text.to_string());
}

TEST(Explain, RefusesWhatTheCallRefuses) {
    PagedAttentionArgs args = paged({});
    args.num_splits = 0;
    EXPECT_THROW(explain(args, "h100"), ValueError);
    Shape shape;
    shape.dtype = DType::float32;
    EXPECT_THROW(explain(paged(shape), "h100"), TypeError);
    EXPECT_EQ(kind_of(paged(shape), "cpu"), "cpu_attention");
}

// Before anything is planned or launched, so that no GPU is needed.
TEST(Checks, RefuseWhatNoCudaKernelComputes) {
    AttentionArgs args = dense({1, 16, 2, 1, 64, 16, 16, 0, DType::float32});
    EXPECT_NO_THROW(check_attention(args));  // on the device meta
    for (TensorView* array : {&args.q, &args.k, &args.v, &args.out}) array->device = {DeviceType::cuda, 0};
    EXPECT_THROW(check_attention(args), TypeError);
    for (TensorView* array : {&args.q, &args.k, &args.v, &args.out}) array->dtype = DType::float16;
    EXPECT_NO_THROW(check_attention(args));
}

}  // namespace
}  // namespace octavo
