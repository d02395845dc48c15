// Decoding on CUDA where blocks are dealt out, one sequence, a few or short ones, against the CPU: every
// length, page size and shape that this kernel meets, and captured graphs whose lengths change.
#include "cuda_testing.h"

#include <octavo/paged_attention.h>

#include <memory>
#include <string>

namespace octavo {
namespace {

struct Shape {
    int64_t num_kv_heads, group_size, head_dim, page_size;
    int64_t seqlen_q = 1;
};

// A batch whose page table has `spare_pages` columns more than it needs.
class Problem {
  public:
    Problem(unsigned seed, const Shape& shape, const std::vector<int32_t>& lengths, int64_t spare_pages)
        : random_(seed),
          shape_(shape),
          dtype_(random_.pick({DType::float16, DType::bfloat16})),
          cache_(random_, lengths, shape.page_size, shape.num_kv_heads, shape.head_dim, dtype_),
          max_pages_(cache_.max_pages + spare_pages),
          cu_seqlens_q_(cumulative(std::vector<int32_t>(lengths.size(), shape.seqlen_q))),
          table_(widened(cache_, max_pages_)),
          lengths_(cache_.lengths),
          q_(random_.normal(num_rows() * shape.head_dim, dtype_)),
          k_(cache_.k),
          v_(cache_.v),
          out_(nans(q_.host.size(), dtype_)),
          lse_(std::vector<float>(num_rows(), NAN)),
          slopes_(slopes_for(num_q_heads())) {
        common_.causal = !random_.one_in(4);
        if (random_.one_in(4)) common_.softcap = 20.0;
        with_alibi_ = random_.one_in(3);
    }

    PagedAttentionArgs on_gpu() { return arguments(kOnGpu); }

    void run_on_gpu(cudaStream_t stream = nullptr) {
        PagedAttentionArgs args = on_gpu();
        args.stream = stream;
        paged_attention(args);
    }

    void set_batch_invariant() { common_.batch_invariant = true; }

    void set_lengths(const std::vector<int32_t>& lengths) {
        lengths_.host = lengths;
        lengths_.upload(lengths);
        out_.upload(nans(q_.host.size(), dtype_));
        lse_.upload(std::vector<float>(num_rows(), NAN));
    }

    void expect_what_the_cpu_gives() {
        SCOPED_TRACE(name());
        const auto out = out_.fetch();
        const auto lse = lse_.fetch();
        paged_attention(arguments(kOnHost));
        expect_close(out, out_.host, dtype_);
        expect_close(lse, lse_.host);
    }

    std::string name() const {
        std::string lengths;
        for (size_t i = 0; i < std::min<size_t>(lengths_.host.size(), 16); ++i) {
            lengths += " " + std::to_string(lengths_.host[i]);
        }
        return "batch " + std::to_string(cache_.batch) + ", lengths" + lengths + ", heads " +
               std::to_string(num_q_heads()) + "/" + std::to_string(shape_.num_kv_heads) + ", head_dim " +
               std::to_string(shape_.head_dim) + ", page_size " + std::to_string(shape_.page_size) +
               ", queries " + std::to_string(shape_.seqlen_q);
    }
    std::vector<uint16_t> out_bits() const { return out_.fetch(); }

  private:
    static std::vector<int32_t> widened(const Cache& cache, int64_t max_pages) {
        std::vector<int32_t> table(cache.batch * max_pages, 1 << 30);
        for (int64_t b = 0; b < cache.batch; ++b) {
            const auto row = cache.table.begin() + b * cache.max_pages;
            std::copy(row, row + cache.max_pages, table.begin() + b * max_pages);
        }
        return table;
    }
    int64_t num_q_heads() const { return shape_.num_kv_heads * shape_.group_size; }
    int64_t total_q() const { return cache_.batch * shape_.seqlen_q; }
    int64_t num_rows() const { return total_q() * num_q_heads(); }

    template <class View>
    PagedAttentionArgs arguments(View view) {
        PagedAttentionArgs args = common_;
        args.q = view(q_, dtype_, {total_q(), num_q_heads(), shape_.head_dim});
        args.out = view(out_, dtype_, {total_q(), num_q_heads(), shape_.head_dim});
        args.lse = view(lse_, DType::float32, {total_q(), num_q_heads()});
        for (const bool is_k : {true, false}) {
            (is_k ? args.k_pages : args.v_pages) =
                view(is_k ? k_ : v_, dtype_,
                     {cache_.num_pages, shape_.page_size, shape_.num_kv_heads, shape_.head_dim});
        }
        args.page_table = view(table_, DType::int32, {cache_.batch, max_pages_});
        args.seq_lens = view(lengths_, DType::int32, {cache_.batch});
        if (shape_.seqlen_q > 1) {
            args.cu_seqlens_q = view(cu_seqlens_q_, DType::int32, {cache_.batch + 1});
            args.max_seqlen_q = shape_.seqlen_q;
        }
        if (with_alibi_) args.alibi_slopes = view(slopes_, DType::float32, {num_q_heads()});
        return args;
    }

    Random random_;
    Shape shape_;
    DType dtype_;
    Cache cache_;
    int64_t max_pages_;
    Mirror<int32_t> cu_seqlens_q_, table_, lengths_;
    Mirror<uint16_t> q_, k_, v_, out_;
    Mirror<float> lse_, slopes_;
    PagedAttentionArgs common_;
    bool with_alibi_;
};

constexpr Shape kShapes[] = {
    {32, 1, 128, 16},   {8, 4, 128, 16},   {1, 8, 128, 16},     {2, 16, 128, 16},  {4, 7, 128, 64},
    {8, 5, 128, 1},     {3, 4, 64, 8},     {40, 1, 64, 24},     {2, 8, 96, 16},    {5, 3, 80, 5},
    {2, 8, 256, 16},    {16, 1, 192, 24},  {1, 4, 256, 1},      {132, 1, 64, 16},  {140, 1, 64, 16},
    {2, 4, 128, 16, 4}, {4, 2, 64, 24, 3}, {1, 2, 256, 16, 4},  {2, 1, 96, 1, 16}, {70, 2, 128, 48},
    {1, 1, 128, 256},   {1, 16, 96, 3},    {12, 4, 192, 16, 2},
};

void expect_split_kv(Problem& problem, const std::string& policy) {
    EXPECT_EQ(kind_of(problem.on_gpu()), "split_kv_decode") << problem.name();
    EXPECT_EQ(planned(problem.on_gpu(), "policy"), policy) << problem.name();
}

// Twice, since the second launch meets what the first left behind.
void expect_right(Problem& problem) {
    problem.run_on_gpu();
    ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess) << problem.name();
    const auto first_bits = problem.out_bits();
    problem.run_on_gpu();
    ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess) << problem.name();
    ASSERT_EQ(first_bits, problem.out_bits()) << "from call to call, " << problem.name();
    problem.expect_what_the_cpu_gives();
}

// Of one shape.
class CudaDecodeDealtTest : public ::testing::TestWithParam<size_t> {
  protected:
    const Shape& shape_ = kShapes[GetParam()];
};

TEST_P(CudaDecodeDealtTest, AgreesWithTheCpu) {
    constexpr int32_t kLengths[] = {0, 1, 15, 16, 17, 100, 129, 1000, 2049};
    unsigned seed = 1 + std::size(kLengths) * GetParam();
    for (const int32_t length : kLengths) {
        Problem problem(seed, shape_, {length}, seed % 3 == 0 ? 0 : seed % 3 * 200);
        ++seed;
        if (shape_.num_kv_heads <= num_sms()) expect_split_kv(problem, "even");
        expect_right(problem);
        if (HasFatalFailure()) return;
    }
}

TEST_P(CudaDecodeDealtTest, AgreesWithTheCpuOnShortSequences) {
    unsigned seed = 500 + 2 * GetParam();
    for (const size_t batch : {3, 40}) {
        const int32_t most = batch == 3 ? 240 : 100;
        std::vector<int32_t> lengths(batch);
        for (size_t i = 0; i < batch; ++i) lengths[i] = static_cast<int32_t>(i * 37 % (most + 1));
        Problem problem(seed++, shape_, lengths, 0);
        expect_right(problem);
        if (HasFatalFailure()) return;
    }
}

TEST_P(CudaDecodeDealtTest, AgreesWithTheCpuOnFewSequences) {
    const std::vector<int32_t> batches[] = {{400, 400},
                                            {1, 1501},
                                            {0, 300, 0},
                                            {1049, 17, 300, 499},
                                            {0, 0, 0},
                                            {16, 32, 48, 64},
                                            {5, 5, 1300, 5, 5, 5, 5, 700}};
    unsigned seed = 3000 + std::size(batches) * GetParam();
    for (const std::vector<int32_t>& lengths : batches) {
        Problem problem(seed, shape_, lengths, seed % 2 * 60);
        ++seed;
        const auto num_items = static_cast<int64_t>(lengths.size()) * shape_.num_kv_heads;
        if (2 * num_items <= num_sms()) {
            EXPECT_EQ(kind_of(problem.on_gpu()), "split_kv_decode") << problem.name();
        }
        expect_right(problem);
        if (HasFatalFailure()) return;
    }
}

INSTANTIATE_TEST_SUITE_P(Shapes, CudaDecodeDealtTest, ::testing::Range(size_t{0}, std::size(kShapes)));

TEST(CudaDecodeDealt, AgreesWithTheCpuOnLongSequences) {
    unsigned seed = 1000;
    for (const Shape& shape :
         {Shape{1, 8, 128, 16}, Shape{2, 4, 64, 1}, Shape{1, 2, 256, 7}, Shape{3, 1, 128, 64}}) {
        for (const int32_t length : {5003, 20011}) {
            Problem problem(seed++, shape, {length}, 40);
            expect_split_kv(problem, "even");
            expect_right(problem);
            if (HasFatalFailure()) return;
        }
    }
}

TEST(CudaDecodeDealt, AgreesWithTheCpuOnThirtyTwoSequences) {
    unsigned seed = 4000;
    for (const Shape& shape : {Shape{1, 8, 128, 16}, Shape{2, 4, 64, 24}, Shape{1, 1, 256, 1}}) {
        for (const int32_t longest : {400, 2000}) {
            std::vector<int32_t> lengths(32);
            for (int32_t i = 0; i < 32; ++i) lengths[i] = i * i * 389 % longest;
            Problem problem(seed++, shape, lengths, 30);
            if (64 * shape.num_kv_heads <= num_sms()) expect_split_kv(problem, "by_length");
            expect_right(problem);
            if (HasFatalFailure()) return;
        }
    }
}

// So many that each item has one CTA.
TEST(CudaDecodeDealt, AgreesWithTheCpuOnManySequences) {
    unsigned seed = 5000;
    for (const Shape& shape : {Shape{8, 4, 128, 16}, Shape{12, 1, 96, 5}, Shape{16, 2, 64, 48},
                               Shape{8, 8, 80, 16, 2}, Shape{10, 1, 256, 16}}) {
        std::vector<int32_t> lengths(110);
        for (int32_t i = 0; i < 110; ++i) lengths[i] = i * 37 % 431;
        Problem problem(seed++, shape, lengths, 0);
        if (110 * shape.num_kv_heads >= 6 * num_sms()) {
            expect_split_kv(problem, "even");
            EXPECT_EQ(planned(problem.on_gpu(), "items"), "many") << problem.name();
        }
        expect_right(problem);
        if (HasFatalFailure()) return;
    }
}

// Two problems on streams of their own, at once, in graphs that were captured with other lengths.
void expect_right_replays(std::initializer_list<std::pair<Shape, int>> batches, bool batch_invariant) {
    constexpr int kStreams = 2, kMaxLength = 3000;
    unsigned seed = 2000;
    for (const auto& [shape, batch] : batches) {
        std::unique_ptr<Problem> problems[kStreams];
        cudaStream_t streams[kStreams];
        cudaGraphExec_t graphs[kStreams];
        for (int i = 0; i < kStreams; ++i) {
            problems[i] =
                std::make_unique<Problem>(seed++, shape, std::vector<int32_t>(batch, kMaxLength), 20);
            if (batch_invariant) problems[i]->set_batch_invariant();
            EXPECT_EQ(kind_of(problems[i]->on_gpu()), "split_kv_decode") << problems[i]->name();
            ASSERT_EQ(cudaStreamCreateWithFlags(&streams[i], cudaStreamNonBlocking), cudaSuccess);
            cudaGraph_t graph;
            ASSERT_EQ(cudaStreamBeginCapture(streams[i], cudaStreamCaptureModeThreadLocal), cudaSuccess);
            for (int call = 0; call < 20; ++call) problems[i]->run_on_gpu(streams[i]);
            ASSERT_EQ(cudaStreamEndCapture(streams[i], &graph), cudaSuccess);
            ASSERT_EQ(cudaGraphInstantiate(&graphs[i], graph, 0), cudaSuccess);
            cudaGraphDestroy(graph);
        }
        for (const int32_t length : {kMaxLength, 0, 1, 16, 130, 999, 2048, 5}) {
            for (int i = 0; i < kStreams; ++i) {
                std::vector<int32_t> lengths(batch);  // the first as long as that, others more equal or less
                for (int j = 0; j < batch; ++j) {
                    lengths[j] = std::max(j % 2 == 0 ? length - 3 * i - 7 * j : kMaxLength - length, 0);
                }
                problems[i]->set_lengths(lengths);
            }
            // A copy from pageable memory may still be under way, and these streams do not wait for it.
            ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
            for (int i = 0; i < kStreams; ++i) ASSERT_EQ(cudaGraphLaunch(graphs[i], streams[i]), cudaSuccess);
            ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
            for (int i = 0; i < kStreams; ++i) {
                problems[i]->expect_what_the_cpu_gives();
                if (::testing::Test::HasFatalFailure()) return;
            }
        }
        for (int i = 0; i < kStreams; ++i) {
            cudaGraphExecDestroy(graphs[i]);
            cudaStreamDestroy(streams[i]);
        }
    }
}

TEST(CudaDecodeDealt, ReplaysWithOtherLengths) {
    expect_right_replays({{Shape{32, 1, 128, 16}, 1},
                          {Shape{8, 4, 128, 1}, 1},
                          {Shape{1, 8, 128, 24}, 1},
                          {Shape{2, 8, 64, 16, 2}, 1},
                          {Shape{8, 4, 128, 16}, 3},
                          {Shape{2, 4, 64, 1}, 7}},
                         false);
}

// The last one has so many units that CTAs look at the length first.
TEST(CudaDecodeDealt, BatchInvariantReplaysWithOtherLengths) {
    expect_right_replays({{Shape{32, 1, 128, 16}, 1},
                          {Shape{1, 8, 128, 24}, 1},
                          {Shape{2, 8, 64, 16, 2}, 3},
                          {Shape{8, 4, 128, 1}, 5},
                          {Shape{4, 2, 64, 16}, 40}},
                         true);
}

}  // namespace
}  // namespace octavo
