// The blocks of 16 keys that a warp works on, and their way from the pages to the products.
#pragma once

#include "cuda/decode/segments.cuh"
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
        keep(a);
        keep(a_transposed);
        keep(b);
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

// Copies a warp's blocks, segment after segment as a walk (segments.cuh) names them, and the queries of their
// items to shared memory.
template <class T, class Config, class Walk>
class Copier {
  public:
    __device__ Copier(const ForwardParams& p, const FastDivide& page_size, const FastDivide& group_size)
        : p_(p), page_size_(page_size), group_size_(group_size) {
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
        keep(lane_row_);
        keep(k_);
        keep(v_);
        keep(place_);
        keep(page_stride_);
        keep(token_stride_);
    }

    // Before the first copy; false if there is nothing to copy.
    __device__ bool begin(const Schedule<Config::kThreads>& schedule, const Walk& walk) {
        schedule_ = &schedule;
        walk_ = &walk;
        if (walk.empty()) return false;
        next_segment_ = walk.first();
        ask_for_pages();
        begin_segment();
        return true;
    }

    // The next segment, once this one's last block is copied; false if there is none.
    __device__ bool begin_next() {
        if (has_next_) begin_segment();
        return has_next_;
    }

    __device__ const Segment& segment() const { return segment_; }

    // Starts the copies of block `index` of the item, whole rows at a time: requests of 64 bytes instead
    // reach 2.3 of 2.9 TB/s on an H100. In the place of a row that no query sees, one that some query sees;
    // without any, nothing is copied.
    __device__ void copy(Rows<Config> k, Rows<Config> v, int32_t index) {
        const int lane = threadIdx.x % 32;
        const int32_t first_key = tiles_.start(index), key = first_key + lane % kBlockKeys;
        const uint32_t needed = __ballot_sync(~0u, tiles_.needed(key)) & 0xffff;
        const int32_t first_page = page_size_.quotient(first_key), page = page_size_.quotient(key);
        if (OCTAVO_RARE(first_page >= window_ + 64)) {  // past a gap between prefix and window
            next_window_ = first_page;
            next_ids_ = load_ids(segment_.item, first_page, end_page_);
            window_ = first_page - 32;
        }
        if (first_page >= window_ + 32) next_pages();
        if (needed != 0) copy_rows(k, v, key, page, needed);
        const bool is_last = index + 1 == segment_.end - segment_.item.begin;
        if (!asked_ && (window_ + 32 >= end_page_ || is_last)) ask_next_segment();
    }

    // The queries of the item and the slopes of their heads, zeros in rows that it does not have.
    __device__ void copy_queries(Rows<Config> q) const {
        // Lane l knows row l.
        const DecodeRow own(seq_, group_size_, segment_.item.kv_head, threadIdx.x % 32);
        const uint32_t own_offset = static_cast<uint32_t>(
            (seq_.q_begin + own.token * p_.q_token_stride + own.head * p_.q_head_stride) / kPerChunk);
        const uint32_t rows = __ballot_sync(~0u, own.valid);
        const uint4* const column = static_cast<const uint4*>(p_.q) + column_;
#pragma unroll
        for (int first = 0; first < Config::kRows; first += kRowsPerCopy) {
            const int row = first + lane_row_;
            const uint32_t offset = __shfl_sync(~0u, own_offset, row);
            if (column_ < Config::kHeadDim / 8) {
                const bool valid = (rows >> row & 1) && 8 * column_ < p_.head_dim;
                ptx::cp_async_16(row_place(q.address + place_, first), valid ? from(column, offset) : p_.q,
                                 valid);
            }
        }
        // A load into registers would wait behind the copies.
        if (OCTAVO_RARE(p_.alibi_slopes != nullptr) && threadIdx.x % 32 < Config::kRows) {
            const float* const slopes = p_.alibi_slopes + segment_.item.sequence * p_.alibi_batch_stride;
            ptx::cp_async_4(slope_address(q, threadIdx.x % 32), slopes + (own.valid ? own.head : 0),
                            own.valid);
        }
    }

  private:
    static constexpr int kPerChunk = 16 / sizeof(T);
    static constexpr int kLanesPerRow = Config::kHeadDim <= 64 ? 8 : (Config::kHeadDim <= 128 ? 16 : 32);
    static constexpr int kRowsPerCopy = 32 / kLanesPerRow;

    __device__ void copy_rows(Rows<Config> k, Rows<Config> v, int32_t key, int32_t page, uint32_t needed) {
        const int lane = threadIdx.x % 32;
        // Lane l knows key l % 16, its row of K for the lower lanes and of V for the upper ones.
        uint32_t id = __shfl_sync(~0u, ids_, page - window_);
        if (OCTAVO_RARE(__any_sync(~0u, page >= window_ + 32 && (needed >> lane % 16 & 1)))) {
            const uint32_t next_id = __shfl_sync(~0u, next_ids_, page - window_);
            if (page >= window_ + 32) id = next_id;
        }
        uint32_t offset = id * page_stride_ +
                          static_cast<uint32_t>(key - page * p_.page_size) * token_stride_ + head_offset_;
        offset = __shfl_sync(~0u, offset, needed >> lane % 16 & 1 ? lane : (lane & 16) + __ffs(needed) - 1);
        const bool valid = 8 * column_ < p_.head_dim;
        const uint32_t k_place = k.address + place_, v_place = v.address + place_;
#pragma unroll
        for (int row = 0; row < kBlockKeys; row += kRowsPerCopy) {
            const uint32_t k_offset = __shfl_sync(~0u, offset, lane_row_ + row);
            const uint32_t v_offset = __shfl_sync(~0u, offset, lane_row_ + 16 + row);
            if (column_ < Config::kHeadDim / 8) {
                ptx::cp_async_16_evict_first(row_place(k_place, row), from(k_, k_offset), valid);
                ptx::cp_async_16_evict_first(row_place(v_place, row), from(v_, v_offset), valid);
            }
        }
    }

    __device__ void begin_segment() {
        segment_ = next_segment_;
        asked_ = false;
        seq_ = schedule_->slice(segment_.item.sequence);
        tiles_ = key_blocks(seq_);
        end_page_ = end_page(seq_, tiles_, segment_);
        head_offset_ = static_cast<uint32_t>(segment_.item.kv_head) * head_stride_;
        window_ = next_window_ - 32;  // what was asked for comes into use with the first copy
    }

    // Page ids are held 32 at a time, a lane each, and the next 32 are asked for when these come into use:
    // the segment's next ones, or the next segment's first.
    __device__ void next_pages() {
        ids_ = next_ids_;
        window_ = next_window_;
        if (window_ + 32 < end_page_) {
            next_window_ = window_ + 32;
            next_ids_ = load_ids(segment_.item, next_window_, end_page_);
        }
    }
    // Once the segment's last page ids are in use, or its last block, which may reach into others.
    __device__ void ask_next_segment() {
        asked_ = true;
        next_segment_ = segment_;
        has_next_ = walk_->advance(next_segment_);
        if (has_next_) ask_for_pages();
    }
    // The first ones of the next segment.
    __device__ void ask_for_pages() {
        const SequenceSlice seq = schedule_->slice(next_segment_.item.sequence);
        const KeyTiles tiles = key_blocks(seq);
        next_window_ = page_size_.quotient(tiles.start(next_segment_.begin - next_segment_.item.begin));
        next_ids_ = load_ids(next_segment_.item, next_window_, end_page(seq, tiles, next_segment_));
    }
    __device__ uint32_t load_ids(const Item& item, int32_t first, int32_t end) const {
        const int32_t page = first + static_cast<int32_t>(threadIdx.x % 32);
        return page < end ? p_.page_table[item.sequence * p_.page_table_stride + page] : 0;
    }
    // Behind the last page that the segment needs.
    __device__ int32_t end_page(const SequenceSlice& seq, const KeyTiles& tiles,
                                const Segment& segment) const {
        const int32_t end_key = tiles.start(segment.end - 1 - segment.item.begin) + kBlockKeys;
        return page_size_.quotient(min(end_key, seq.see.seqlen_k) + p_.page_size - 1);
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

    const ForwardParams& p_;
    const FastDivide &page_size_, &group_size_;
    const Schedule<Config::kThreads>* schedule_ = nullptr;
    const Walk* walk_ = nullptr;
    int column_, lane_row_;  // the chunk of a row that this lane copies, and the first row
    const uint4 *k_, *v_;    // that chunk of the cache's first row
    uint32_t place_;         // of the chunk in shared memory
    uint32_t page_stride_, token_stride_, head_stride_;  // of K for the lower lanes, of V; in 16 bytes
    typename Walk::Position segment_, next_segment_;
    bool asked_, has_next_;  // for the next segment; whether there is one
    SequenceSlice seq_;
    KeyTiles tiles_{Visibility{}, 0, 0, kBlockKeys};
    uint32_t head_offset_;
    int32_t end_page_, window_, next_window_;  // window_: the page whose id lane 0 holds
    uint32_t ids_, next_ids_;
};

}  // namespace octavo::cuda
