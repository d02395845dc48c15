// The way of keys, values and queries from global to shared memory, and from there to the products.
#pragma once

#include "cuda/decode/item.cuh"
#include "cuda/ptx/l2_policy.h"
#include "cuda/ptx/ldmatrix.h"
#include "cuda/warp.cuh"

namespace octavo::cuda {

// Rows of head_dim elements in shared memory, of keys, values or queries, which start at a multiple of 128
// bytes: chunk c of row r stands in the place of chunk c ^ r % 8, so that neither the copies of a row nor
// reads of one chunk of eight rows meet a bank conflict.
template <class Config>
struct Rows {
    uint32_t address;  // in the shared window

    // Where lanes read from: the start of the rows, and a row and a chunk below eight for each lane.
    __device__ static uint32_t offset(int row, int chunk) {
        return 16 * (row * Config::kRowChunks + (chunk ^ (row % 8)));
    }
    // From there `chunks` further, a multiple of the power of two above the lanes' chunks.
    __device__ static uint32_t advance(uint32_t address, int chunks) {
        return (address ^ (16 * (chunks % 8))) + 16 * (chunks / 8 * 8);
    }
};

// The slope of row `row`, behind the rows of an item's queries.
template <class Config>
__device__ __forceinline__ uint32_t slope_address(Rows<Config> queries, int row) {
    return queries.address + 16 * Config::kRows * Config::kRowChunks + static_cast<int>(sizeof(float)) * row;
}

// The places from which a lane reads the operands of mma.sync in a block.
template <class Config>
struct Operands {
    uint32_t a, a_transposed, b;

    __device__ Operands() {
        const int lane = threadIdx.x % 32;
        a = Rows<Config>::offset(lane % 16, lane / 16);
        a_transposed = Rows<Config>::offset(lane % 8 + lane / 16 * 8, lane / 8 % 2);
        b = Rows<Config>::offset(lane % 8, lane / 8);
        pin_in_register(a);
        pin_in_register(a_transposed);
        pin_in_register(b);
    }

    // Operand a of a product over dims: 16 rows by dims 16 j and on.
    __device__ void load_a(uint32_t (&words)[4], Rows<Config> rows, int j) const {
        ptx::ldmatrix_x4(words, Rows<Config>::advance(rows.address + a, 2 * j));
    }
    // The same for rows that are the depth of the product: dims 16 j and on by 16 rows.
    __device__ void load_a_transposed(uint32_t (&words)[4], Rows<Config> rows, int j) const {
        ptx::ldmatrix_x4_trans(words, Rows<Config>::advance(rows.address + a_transposed, 2 * j));
    }
    // Operand b of two products over dims 32 j and on: rows 8 tile and on.
    __device__ void load_b(uint32_t (&words)[4], Rows<Config> rows, int tile, int j) const {
        ptx::ldmatrix_x4(words,
                         Rows<Config>::advance(rows.address + b, 4 * j) + 128 * tile * Config::kRowChunks);
    }
};

// Copies rows of keys, values and queries to shared memory, whole rows at a time: requests of 64 bytes
// instead reach 2.3 of 2.9 TB/s on an H100.
template <class T, class Config>
class RowCopier {
  public:
    __device__ explicit RowCopier(const AttentionParams& p) : p_(p) {
        const int lane = threadIdx.x % 32;
        column_ = lane % kLanesPerRow;
        lane_row_ = lane / kLanesPerRow;
        // Columns from head_dim on become zeros, from an address that is mapped.
        k_ = static_cast<const uint4*>(p.k) + (8 * column_ < p.head_dim ? column_ : 0);
        v_ = static_cast<const uint4*>(p.v) + (8 * column_ < p.head_dim ? column_ : 0);
        place_ = 16 * (lane_row_ * Config::kRowChunks + (column_ ^ lane_row_));
        page_stride_ = static_cast<uint32_t>((lane < 16 ? p.k_outer_stride : p.v_outer_stride) / kPerChunk);
        token_stride_ = static_cast<uint32_t>((lane < 16 ? p.k_token_stride : p.v_token_stride) / kPerChunk);
        head_stride_ = static_cast<uint32_t>((lane < 16 ? p.k_head_stride : p.v_head_stride) / kPerChunk);
        pin_in_register(lane_row_);
        pin_in_register(k_);
        pin_in_register(v_);
        pin_in_register(place_);
        pin_in_register(page_stride_);
        pin_in_register(token_stride_);
    }

    // In units of 16 bytes from the cache's start, of K for the lower 16 lanes and of V for the upper ones.
    __device__ uint32_t head_offset(int32_t kv_head) const {
        return static_cast<uint32_t>(kv_head) * head_stride_;
    }
    __device__ uint32_t row_offset(uint32_t page_id, int32_t slot, uint32_t head_offset) const {
        return page_id * page_stride_ + static_cast<uint32_t>(slot) * token_stride_ + head_offset;
    }

    // Starts the copies of a block, of which lane l knows the offset of row l % 16.
    __device__ void copy(Rows<Config> k, Rows<Config> v, uint32_t offset) const {
#pragma unroll
        for (int row = 0; row < kBlockKeys; row += kRowsPerCopy) {
            copy_rows(k.address + place_, row, k_, __shfl_sync(~0u, offset, lane_row_ + row));
            copy_rows(v.address + place_, row, v_, __shfl_sync(~0u, offset, lane_row_ + 16 + row));
        }
    }
    // The same of keys or values alone, to a multiple of 512 bytes.
    __device__ void copy_keys(Rows<Config> k, uint32_t offset) const { copy_half(k, k_, offset, 0); }
    __device__ void copy_values(Rows<Config> v, uint32_t offset) const { copy_half(v, v_, offset, 16); }

    // The queries of an item and the slopes of their heads, zeros in rows that it does not have.
    __device__ void copy_queries(Rows<Config> q, const SequenceSlice& seq, const FastDivide& group_size,
                                 int32_t sequence, int32_t kv_head) const {
        // Lane l knows row l.
        const DecodeRow own(seq, group_size, kv_head, threadIdx.x % 32);
        const uint32_t own_offset = query_begin(seq) + query_offset(own);
        const uint32_t rows = __ballot_sync(~0u, own.valid);
#pragma unroll
        for (int first = 0; first < Config::kRows; first += kRowsPerCopy) {
            const int row = first + lane_row_;
            copy_query_rows(q, first, __shfl_sync(~0u, own_offset, row), rows >> row & 1);
        }
        if (p_.alibi_slopes != nullptr) copy_slopes(q, own, sequence);
    }
    static constexpr int kPerChunk = 16 / sizeof(T);
    static constexpr int kLanesPerRow = Config::kHeadDim <= 64 ? 8 : (Config::kHeadDim <= 128 ? 16 : 32);
    static constexpr int kRowsPerCopy = 32 / kLanesPerRow;

    // In units of 16 bytes: of a sequence's queries, and of a row from there.
    __device__ static uint32_t query_begin(const SequenceSlice& seq) {
        return static_cast<uint32_t>(seq.q_begin / kPerChunk);
    }
    __device__ uint32_t query_offset(const DecodeRow& row) const {
        return static_cast<uint32_t>((row.token * p_.q_token_stride + row.head * p_.q_head_stride) /
                                     kPerChunk);
    }
    // Where this lane's row is among those of one copy.
    __device__ int lane_row() const { return lane_row_; }
    // One row or several, `row` and on, this lane's from `offset`; zeros if not `valid`.
    __device__ void copy_query_rows(Rows<Config> q, int row, uint32_t offset, bool valid) const {
        valid = valid && 8 * column_ < p_.head_dim;
        if (column_ < Config::kHeadDim / 8) {
            ptx::cp_async_16(row_place(q.address + place_, row),
                             valid ? from(static_cast<const uint4*>(p_.q) + column_, offset) : p_.q, valid);
        }
    }
    // Lane l knows row l. A load into registers would wait behind the copies.
    __device__ void copy_slopes(Rows<Config> q, const DecodeRow& own, int32_t sequence) const {
        if (threadIdx.x % 32 >= Config::kRows) return;
        const float* const slopes = p_.alibi_slopes + sequence * p_.alibi_batch_stride;
        ptx::cp_async_4(slope_address(q, threadIdx.x % 32), slopes + (own.valid ? own.head : 0), own.valid);
    }

  private:
    __device__ void copy_half(Rows<Config> to, const uint4* chunks, uint32_t offset, int first_lane) const {
        // Not a sum, whose uniform part ptxas 13.0 would leave to the copy: beside a cache policy it encodes
        // that as an illegal instruction.
        const uint32_t place = to.address ^ place_;
        static_assert(16 * Config::kRowChunks * kRowsPerCopy <= 512);
#pragma unroll
        for (int row = 0; row < kBlockKeys; row += kRowsPerCopy) {
            copy_rows(place, row, chunks, __shfl_sync(~0u, offset, lane_row_ + first_lane + row));
        }
    }

    // One row or several, `row` and on: this lane's chunk of its row, from `offset`.
    __device__ void copy_rows(uint32_t place, int row, const uint4* chunks, uint32_t offset) const {
        if (column_ < Config::kHeadDim / 8) {
            ptx::cp_async_16_evict_first(row_place(place, row), from(chunks, offset),
                                         8 * column_ < p_.head_dim);
        }
    }
    // The place of this lane's chunk `row` rows further, a multiple of kRowsPerCopy.
    __device__ static uint32_t row_place(uint32_t place, int row) {
        return (place ^ (16 * (row % 8))) + 16 * row * Config::kRowChunks;
    }
    __device__ static const void* from(const uint4* chunks, uint32_t offset) {
        const void* address;  // one instruction, which the compiler would make four
        asm("mad.wide.u32 %0, %1, 16, %2;" : "=l"(address) : "r"(offset), "l"(chunks));
        return address;
    }

    const AttentionParams& p_;
    int column_, lane_row_;  // the chunk of a row that this lane copies, and the first row
    const uint4 *k_, *v_;    // that chunk of the cache's first row
    uint32_t place_;         // of the chunk in shared memory
    uint32_t page_stride_, token_stride_, head_stride_;  // of K for the lower lanes, of V; in 16 bytes
};

// Copies the queries of an item, all warps of a CTA together.
template <class T, class Config>
class QueryCopier {
  public:
    __device__ QueryCopier(const AttentionParams& p, const FastDivide& group_size,
                           const RowCopier<T, Config>& rows, int32_t kv_head, int warp)
        : p_(p), group_size_(group_size), rows_(rows), kv_head_(kv_head), warp_(warp) {
#pragma unroll
        for (int i = 0; i < kCopies; ++i) {
            const DecodeRow row(SequenceSlice{}, group_size, kv_head, first(i) + rows.lane_row());
            tokens_[i] = row.token;
            offsets_[i] = rows.query_offset(row);
            pin_in_register(tokens_[i]);
            pin_in_register(offsets_[i]);
        }
    }

    __device__ void copy(Rows<Config> q, const SequenceSlice& seq, int32_t sequence) const {
#pragma unroll
        for (int i = 0; i < kCopies; ++i) {
            if (first(i) >= Config::kRows) break;
            rows_.copy_query_rows(q, first(i), rows_.query_begin(seq) + offsets_[i],
                                  tokens_[i] < seq.seqlen_q);
        }
        if (OCTAVO_RARE(p_.alibi_slopes != nullptr) && warp_ == Config::kWarps - 1) {
            rows_.copy_slopes(q, DecodeRow(seq, group_size_, kv_head_, threadIdx.x % 32), sequence);
        }
    }

  private:
    static constexpr int kRowsPerCopy = RowCopier<T, Config>::kRowsPerCopy;
    static constexpr int kCopies = (Config::kRows / kRowsPerCopy + Config::kWarps - 1) / Config::kWarps;

    __device__ int first(int i) const { return (i * Config::kWarps + warp_) * kRowsPerCopy; }

    const AttentionParams& p_;
    const FastDivide& group_size_;
    const RowCopier<T, Config>& rows_;
    int32_t kv_head_;
    int warp_;
    int32_t tokens_[kCopies];
    uint32_t offsets_[kCopies];
};

}  // namespace octavo::cuda
