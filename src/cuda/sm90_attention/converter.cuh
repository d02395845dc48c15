// The converters: over pages of codes, one warpgroup puts K and V into shared memory as 16-bit numbers, where
// the consumers find them as the copy engine would have left them. Page: docs/kernels/quantised_prefill.md.
//
// Codes go from global memory straight to registers; the next tile of K and of V is loaded while the ones
// before are converted. On a way through shared memory they would cost its bandwidth, which the products
// need, twice more.
#pragma once

#include "cuda/codes.h"
#include "cuda/ptx/tma.h"
#include "cuda/sm90_attention/shared.cuh"
#include "cuda/tile/code_numbers.cuh"
#include "cuda/tile/code_pages.cuh"

namespace octavo::cuda {

// What a step of a walk over tiles of keys comes to: a tile, a row tile without tiles, or the end.
enum class KeyTileStep { tile, none, end };

// Walks over the tiles of keys of this CTA's row tiles, one after another. A warp converts kWarpKeys keys of
// each.
//
// A row tile is handed out when the one before it has a slot for its queries, and that is when the results of
// an earlier row tile have left. So whoever holds a tile of a row tile may wait for the next row tile, but
// not for the one after that: consumers may need the tile before they store those results. (Where row tiles
// are chained, results leave behind the scores of the next row tile.)
template <class Config>
class KeyTileWalk {
  public:
    static constexpr int kWarpKeys = Config::kKeys / 4;

    __device__ KeyTileWalk(const AttentionParams& p, const Sm90Launch& plan, Sm90Shared<Config>& shared)
        : p_(p), plan_(plan), shared_(shared) {}

    // Whether the next tile is one of the current row tile, so that advance() waits for nothing.
    __device__ bool goes_on() const { return tile_ > 0; }
    // Moves on to that tile.
    __device__ void go_on() { --tile_; }
    // Moves on to the next tile of the current row tile, or waits for the next row tile, and moves on to its
    // first one. That row tile may have none.
    __device__ KeyTileStep advance() {
        if (--tile_ >= 0) return KeyTileStep::tile;
        const Sm90Work work = take_work<Config>(shared_, work_ring_);
        if (work.batch < 0) return KeyTileStep::end;
        tiles_ = key_tiles<Config>(p_, plan_, work);
        tile_ = tiles_.count - 1;
        kv_head_ = work.first_head / p_.group_size();
        page_ids_ = p_.page_table.from(work.batch * p_.page_table_stride);
        return tile_ >= 0 ? KeyTileStep::tile : KeyTileStep::none;
    }
    // Moves on until there is a tile. Waits for any number of row tiles.
    __device__ KeyTileStep find() {
        KeyTileStep step = KeyTileStep::none;
        while (step == KeyTileStep::none) step = advance();
        return step;
    }

    // Where this lane's key lies.
    struct Place {
        bool is_seen;  // whether a query of the row tile sees the key; a key that none sees becomes zeros, so
                       // that it cannot spoil the product with weights of zero
        uint32_t page, slot, kv_head;
    };
    __device__ Place find_place() const {
        const int32_t lane = threadIdx.x % 32;
        const int32_t key = tiles_.start(tile_) + threadIdx.x % 128 / 32 * kWarpKeys + lane;
        const int32_t column = plan_.page_size.quotient(key);
        const bool in_window = (key >= tiles_.window_begin) & (key < tiles_.window_end);
        Place place;  // made without branches, which cost more here than the work that they would skip
        place.is_seen = (lane < kWarpKeys) & (in_window | (key < tiles_.prefix_end));
        place.page = place.is_seen ? page_ids_[column] : 0;
        place.slot = key - column * p_.page_size;
        place.kv_head = kv_head_;
        return place;
    }

  private:
    const AttentionParams& p_;
    const Sm90Launch& plan_;
    Sm90Shared<Config>& shared_;
    Ring<kSm90WorkSlots> work_ring_;
    PrefillKeyTiles<Config::kSplits> tiles_;
    int32_t tile_ = 0, kv_head_ = 0;
    IndexArray page_ids_;
};

// One warp's rows of a tile of K or of V, in registers, on their way from pages to shared memory.
template <class Config, DType kType>
class CodeTile {
  public:
    // Starts loading. Columns that the cache lacks and keys that no query sees become zeros. `place`: where
    // this lane's key lies.
    __device__ void load(const CodePages& pages, const typename KeyTileWalk<Config>::Place& place) {
        const uint32_t seen = __ballot_sync(~0u, place.is_seen), own = pages.strides(place);
        if constexpr (Config::kTokenScales) {
            word_ = bits_of_float(1.0f);
            if (pages.scales) word_ = place.is_seen ? __ldg(pages.scales + pages.scale_strides(place)) : 0;
        }
        if (seen == (uint64_t{1} << KeyTileWalk<Config>::kWarpKeys) - 1 && pages.row_bytes == kTileRowBytes) {
            load_rows<true>(pages, own, seen);
        } else {
            load_rows<false>(pages, own, seen);
        }
    }

    // Converts the codes, and puts the numbers into a tile of shared memory, swizzled as the copy engine does
    // it.
    __device__ __forceinline__ void store(unsigned char* tile) const {
        unsigned char* const rows =
            tile + chunk() / kChunks * Config::kKeyBlockBytes +
            (threadIdx.x % 128 / 32 * KeyTileWalk<Config>::kWarpKeys + row()) * Config::kRowBytes;
        const int first_chunk = (chunk() % kChunks * kNumberChunks) ^ (row() % 8);
#pragma unroll
        for (int i = 0; i < kPasses; ++i) {
            uint32_t word = 0;
            if constexpr (Config::kTokenScales) word = __shfl_sync(~0u, word_, i * kPassKeys + row());
            const Numbers numbers(word);
#pragma unroll
            for (int j = 0; j < kLoads; ++j) {
                const uint4& codes = codes_[i][j];
                uint32_t pairs[4 * kNumberChunks];
                constexpr int kWordPairs = Numbers::kPairs;
                numbers.convert(codes.x, &pairs[0]);
                numbers.convert(codes.y, &pairs[kWordPairs]);
                numbers.convert(codes.z, &pairs[2 * kWordPairs]);
                numbers.convert(codes.w, &pairs[3 * kWordPairs]);
                auto* const chunks = reinterpret_cast<uint4*>(rows + i * kPassKeys * Config::kRowBytes +
                                                              j * kBlocks * Config::kKeyBlockBytes);
#pragma unroll
                for (int n = 0; n < kNumberChunks; ++n) {
                    chunks[first_chunk ^ n] =
                        make_uint4(pairs[4 * n], pairs[4 * n + 1], pairs[4 * n + 2], pairs[4 * n + 3]);
                }
            }
        }
    }

  private:
    using Numbers = CodeNumbers<kType, Config::kTokenScales>;

    // A lane takes one chunk of 16 bytes of codes at a time, and a warp takes kPassKeys rows of kBlocks
    // blocks of columns. Neighbouring lanes take neighbouring chunks of one row of a block, so that eight
    // lanes write to eight different places of the 128 bytes that the banks are wide.
    static constexpr int kChunks = Config::kBlockColumns * bits_of(kType) / 128;  // pieces of a block
    static constexpr int kChunkColumns = 128 / bits_of(kType);
    static constexpr int kTileRowBytes = Config::kHeadDim * bits_of(kType) / 8;
    static constexpr int kNumberChunks = kChunkColumns / 8;  // pieces of 16 bytes
    static constexpr int kBlocks = kChunks == 2 && Config::kColumnBlocks % 2 == 0 ? 2 : 1;
    static constexpr int kLoads = Config::kColumnBlocks / kBlocks;
    static constexpr int kPassKeys = 32 / (kChunks * kBlocks);
    static constexpr int kPasses = KeyTileWalk<Config>::kWarpKeys / kPassKeys;
    static_assert(kPasses * kPassKeys == KeyTileWalk<Config>::kWarpKeys && kPassKeys % 8 == 0);

    // This lane's row and chunk among the rows and chunks that the warp takes at a time.
    __device__ static int row() { return threadIdx.x % 32 / kChunks % kPassKeys; }
    __device__ static int chunk() {
        const int lane = threadIdx.x % 32;
        return lane / (kChunks * kPassKeys) * kChunks + lane % kChunks;
    }

    // `own`: where the row of this lane's key lies. kWhole: all rows are seen, and as long as a tile's.
    template <bool kWhole>
    __device__ __forceinline__ void load_rows(const CodePages& pages, uint32_t own, uint32_t seen) {
        const uint8_t* const chunks = pages.codes + chunk() * 16;
#pragma unroll
        for (int i = 0; i < kPasses; ++i) {
            const int key = i * kPassKeys + row();
            const uint8_t* const from = chunks + static_cast<size_t>(__shfl_sync(~0u, own, key)) * 16;
#pragma unroll
            for (int j = 0; j < kLoads; ++j) {
                constexpr int kBytes = kBlocks * kChunks * 16;  // bytes of a row that are taken at a time
                if (!kWhole) codes_[i][j] = make_uint4(0, 0, 0, 0);
                if (kWhole || ((seen >> key & 1) && chunk() * 16 + j * kBytes < pages.row_bytes))
                    codes_[i][j] = load_past_l1(from + j * kBytes);
            }
        }
    }
    __device__ static uint4 load_past_l1(const uint8_t* from) {
        uint4 x;
        asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                     : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
                     : "l"(from));
        return x;
    }

    uint4 codes_[kPasses][kLoads];
    uint32_t word_;  // the scale of this lane's key
};

// Converts a tile into the next slot of a ring, and hands it to the consumers. The fence also waits for the
// loads that are under way. Consumers have none; but when they executed the fence, in their turns at the
// tensor cores, it took as long.
template <class Config, DType kType, int kStages>
__device__ __forceinline__ void convert_tile(const CodeTile<Config, kType>& codes,
                                             unsigned char (&slots)[kStages][Config::kKeyTileBytes],
                                             uint64_t* full, uint64_t* empty, Ring<kStages>& ring) {
    ptx::mbarrier_wait(&empty[ring.slot], ring.parity ^ 1);
    codes.store(slots[ring.slot]);
    if constexpr (!Config::kConsumersFence) ptx::fence_proxy_async();
    __syncwarp();
    if (threadIdx.x % 32 == 0) ptx::mbarrier_arrive(&full[ring.slot]);
    ring.advance();
}

template <class Config, DType kKeys, DType kValues>
__device__ __forceinline__ void convert_tiles(const AttentionParams& p, const Sm90Launch& plan,
                                              Sm90Shared<Config>& shared) {
    const CodePages keys = CodePages::keys(p), values = CodePages::values(p);
    Ring<Config::kStages> k_ring;
    Ring<Config::kVStages> v_ring;
    KeyTileWalk<Config> tiles(p, plan, shared);
    CodeTile<Config, kKeys> k;
    CodeTile<Config, kValues> v;
    for (KeyTileStep step = tiles.find(); step != KeyTileStep::end;) {
        auto place = tiles.find_place();
        k.load(keys, place);
        v.load(values, place);
        for (bool any = true; any;) {
            step = tiles.advance();
            any = step == KeyTileStep::tile;
            if (any) place = tiles.find_place();
            convert_tile(k, shared.k, shared.k_full, shared.k_empty, k_ring);
            if (any) k.load(keys, place);
            convert_tile(v, shared.v, shared.v_full, shared.v_empty, v_ring);
            if (any) v.load(values, place);
        }
        if (step == KeyTileStep::none) step = tiles.find();
    }
}

// One of two warpgroups, which converts K alone or V alone. Two tiles are on their way while a third one is
// converted.
template <class Config, DType kType, int kStages>
__device__ __forceinline__ void convert_tiles_of(const CodePages& pages, KeyTileWalk<Config>&& tiles,
                                                 unsigned char (&slots)[kStages][Config::kKeyTileBytes],
                                                 uint64_t* full, uint64_t* empty) {
    Ring<kStages> ring;
    CodeTile<Config, kType> first, second;
    bool first_is_held = false, second_is_held = false, is_end = false;
    // Converts `codes` if it holds a tile, and loads the next one into it. False once there is none, and the
    // other tile is not held either.
    const auto take_turn = [&](CodeTile<Config, kType>& codes, bool& is_held, const bool& other_is_held) {
        const bool goes_on = tiles.goes_on();
        typename KeyTileWalk<Config>::Place place{};
        if (goes_on) {
            tiles.go_on();
            place = tiles.find_place();
        }
        if (is_held) convert_tile(codes, slots, full, empty, ring);
        is_held = goes_on;
        if (!goes_on && !is_end) {
            KeyTileStep step;
            do {
                step = tiles.advance();
            } while (step == KeyTileStep::none && !other_is_held);
            is_end = step == KeyTileStep::end;
            is_held = step == KeyTileStep::tile;
            if (is_held) place = tiles.find_place();
        }
        if (is_held) codes.load(pages, place);
        return is_held || other_is_held || !is_end;
    };
    while (take_turn(first, first_is_held, second_is_held) &&
           take_turn(second, second_is_held, first_is_held)) {
    }
}

// `which`: the number of this warpgroup among those that convert.
template <class Config, DType kKeys, DType kValues>
__device__ __forceinline__ void convert(const AttentionParams& p, const Sm90Launch& plan,
                                        Sm90Shared<Config>& shared, int which) {
    if constexpr (Config::kConverters == 1) {
        convert_tiles<Config, kKeys, kValues>(p, plan, shared);
    } else if (which == 0) {
        convert_tiles_of<Config, kKeys>(CodePages::keys(p), KeyTileWalk<Config>(p, plan, shared), shared.k,
                                        shared.k_full, shared.k_empty);
    } else {
        convert_tiles_of<Config, kValues>(CodePages::values(p), KeyTileWalk<Config>(p, plan, shared),
                                          shared.v, shared.v_full, shared.v_empty);
    }
}

template <class Config>
__device__ void run_converters(const AttentionParams& p, const Sm90Launch& plan, Sm90Shared<Config>& shared,
                               int which) {
    switch (plan.codes) {
        case Codes::none: break;
        case Codes::e4m3:
            return convert<Config, DType::float8_e4m3fn, DType::float8_e4m3fn>(p, plan, shared, which);
        case Codes::e5m2:
            return convert<Config, DType::float8_e5m2, DType::float8_e5m2>(p, plan, shared, which);
        case Codes::int8: return convert<Config, DType::int8, DType::int8>(p, plan, shared, which);
        default: break;
    }
    if constexpr (Config::kTokenScales) {
        if (plan.codes == Codes::int4) convert<Config, DType::int4, DType::int4>(p, plan, shared, which);
        if (plan.codes == Codes::int8_int4) convert<Config, DType::int8, DType::int4>(p, plan, shared, which);
    } else {
        __trap();  // int4 always has a scale for each key: Sm90Plan::token_scales
    }
}

}  // namespace octavo::cuda
