// Copies queries from global to shared memory.
#pragma once

#include "cuda/decode/item.cuh"
#include "cuda/decode/rows.cuh"
#include "cuda/ptx/cp_async.h"
#include "cuda/warp.cuh"

namespace octavo::cuda {

// Copies rows of queries, whole rows at a time.
template <class T, class Config>
class QueryRowCopier {
  public:
    static constexpr int kPerChunk = 16 / sizeof(T);
    static constexpr int kLanesPerRow = Config::kHeadDim <= 64 ? 8 : (Config::kHeadDim <= 128 ? 16 : 32);
    static constexpr int kRowsPerCopy = 32 / kLanesPerRow;
    // How many chunks of a row a lane copies, kLanesPerRow apart.
    static constexpr int kChunks = (Config::kHeadDim / 8 + kLanesPerRow - 1) / kLanesPerRow;
    static_assert(kChunks == 1 || Config::kHeadDim / 8 == kChunks * kLanesPerRow);

    __device__ explicit QueryRowCopier(const AttentionParams& p) : p_(p) {
        const int lane = threadIdx.x % 32;
        column_ = lane % kLanesPerRow;
        lane_row_ = lane / kLanesPerRow;
        place_ = QueryRows<Config>::offset(lane_row_, column_);
        pin_in_register(lane_row_);
        pin_in_register(place_);
    }

    // Copies the queries of an item and the numbers of their heads. Rows that the item does not have become
    // zeros.
    __device__ void copy_queries(QueryRows<Config> q, const SequenceSlice& seq, const FastDivide& group_size,
                                 int32_t sequence, int32_t kv_head) const {
        // Lane l holds row l.
        const DecodeRow own(seq, group_size, kv_head, threadIdx.x % 32);
        const uint32_t own_offset = query_begin(seq) + query_offset(own);
        const uint32_t rows = __ballot_sync(~0u, own.valid);
#pragma unroll
        for (int first = 0; first < Config::kRows; first += kRowsPerCopy) {
            const int row = first + lane_row_;
            copy_query_rows(q, first, __shfl_sync(~0u, own_offset, row), rows >> row & 1);
        }
        if (p_.has_head_numbers) copy_head_numbers(q, own, sequence);
    }

    // Offsets in units of 16 bytes: of a sequence's queries, and of a row from there.
    __device__ static uint32_t query_begin(const SequenceSlice& seq) {
        return static_cast<uint32_t>(seq.q_begin / kPerChunk);
    }
    __device__ uint32_t query_offset(const DecodeRow& row) const {
        return static_cast<uint32_t>((row.token * p_.q_token_stride + row.head * p_.q_head_stride) /
                                     kPerChunk);
    }
    // The index of this lane's row among those that one copy moves.
    __device__ int lane_row() const { return lane_row_; }
    // Copies one row or several, from `row` on; this lane's comes from `offset`, or is zeros if not `valid`.
    __device__ void copy_query_rows(QueryRows<Config> q, int row, uint32_t offset, bool valid) const {
#pragma unroll
        for (int chunk = 0; chunk < kChunks * kLanesPerRow; chunk += kLanesPerRow) {
            const bool exists = valid && 8 * (column_ + chunk) < p_.head_dim;
            if (kChunks > 1 || column_ < Config::kHeadDim / 8) {
                const uint4* const first = static_cast<const uint4*>(p_.q) + (column_ + chunk);
                ptx::cp_async_16(QueryRows<Config>::advance_rows(q.address + place_, row) + 16 * chunk,
                                 exists ? chunk_at(first, offset) : p_.q, exists);
            }
        }
    }
    // Lane l copies the slope and the softmax_phi of row l to shared memory, or the word of its tree mask,
    // since loads into registers would wait behind the copies.
    __device__ void copy_head_numbers(QueryRows<Config> q, const DecodeRow& own, int32_t sequence) const {
        const int lane = threadIdx.x % 32;
        if (lane >= Config::kRows) return;
        const int head = own.valid ? own.head : 0;
        if (p_.alibi_slopes) {
            const float* const slopes = p_.alibi_slopes + sequence * p_.alibi_batch_stride;
            ptx::cp_async_4(slope_address<Config>(q, lane), slopes + head, own.valid);
        }
        if (p_.softmax_phi_of_heads)
            ptx::cp_async_4(phi_address<Config>(q, lane), p_.softmax_phi_of_heads + head, own.valid);
        if (p_.has_tree_mask) {
            const int64_t token = own.valid ? p_.first_token(sequence) + own.token : 0;
            ptx::cp_async_4(tree_word_address<Config>(q, lane), p_.tree_mask + 2 * token, own.valid);
        }
    }

    // The address `offset` chunks behind `chunks`.
    __device__ static const void* chunk_at(const uint4* chunks, uint32_t offset) {
        const void* address;  // computed in one instruction, where the compiler would take four
        asm("mad.wide.u32 %0, %1, 16, %2;" : "=l"(address) : "r"(offset), "l"(chunks));
        return address;
    }

  protected:
    const AttentionParams& p_;
    int column_, lane_row_;  // the chunk of a row that this lane copies, and the first row
    uint32_t place_;         // the chunk's place in shared memory
};

// Copies the queries of an item, all warps of a CTA together.
template <class T, class Config>
class QueryCopier {
  public:
    __device__ QueryCopier(const AttentionParams& p, const FastDivide& group_size,
                           const QueryRowCopier<T, Config>& rows, int32_t kv_head, int warp)
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

    __device__ void copy(QueryRows<Config> q, const SequenceSlice& seq, int32_t sequence) const {
#pragma unroll
        for (int i = 0; i < kCopies; ++i) {
            if (first(i) >= Config::kRows) break;
            rows_.copy_query_rows(q, first(i), rows_.query_begin(seq) + offsets_[i],
                                  tokens_[i] < seq.seqlen_q);
        }
        if (OCTAVO_RARE(p_.has_head_numbers) && warp_ == Config::kWarps - 1) {
            rows_.copy_head_numbers(q, DecodeRow(seq, group_size_, kv_head_, threadIdx.x % 32), sequence);
        }
    }

  private:
    static constexpr int kRowsPerCopy = QueryRowCopier<T, Config>::kRowsPerCopy;
    static constexpr int kCopies = (Config::kRows / kRowsPerCopy + Config::kWarps - 1) / Config::kWarps;

    __device__ int first(int i) const { return (i * Config::kWarps + warp_) * kRowsPerCopy; }

    const AttentionParams& p_;
    const FastDivide& group_size_;
    const QueryRowCopier<T, Config>& rows_;
    int32_t kv_head_;
    int warp_;
    int32_t tokens_[kCopies];
    uint32_t offsets_[kCopies];
};

}  // namespace octavo::cuda
