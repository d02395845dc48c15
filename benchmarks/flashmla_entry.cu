// FlashMLA's dense decoding kernels behind two C functions, without the rest of its extension
// (build_flashmla.py). All arrays are contiguous, pages have 64 tokens, and a sequence has one query.
#include "params.h"
#include "sm90/decode/dense/splitkv_mla.h"
#include "smxx/decode/combine/combine.h"
#include "smxx/decode/get_decoding_sched_meta/get_decoding_sched_meta.h"

#include <cutlass/bfloat16.h>

#include <cmath>
#include <cstdint>

namespace {
constexpr int kQkDim = 576, kVDim = 512, kPageSize = 64;
constexpr int kOverheadBlocks = 5;  // what FlashMLA's own extension passes
}  // namespace

// Shares the pages of all sequences among `num_parts` CTAs for each 64 heads.
extern "C" int flashmla_plan(int batch, int* seq_lens, int num_parts, void* parts, int* num_splits,
                             cudaStream_t stream) {
    GetDecodeSchedMetaParams p{};
    p.b = batch;
    p.s_q = 1;
    p.block_size_n = kPageSize;
    p.fixed_overhead_num_blocks = kOverheadBlocks;
    p.topk = p.extra_topk = -1;
    p.seqlens_k_ptr = seq_lens;
    p.tile_scheduler_metadata_ptr = static_cast<DecodingSchedMeta*>(parts);
    p.num_splits_ptr = num_splits;
    p.num_sm_parts = num_parts;
    p.stream = stream;
    smxx::decode::run_get_decoding_sched_meta_kernel(p);
    return cudaGetLastError();
}

extern "C" int flashmla_decode(int batch, int heads, int num_pages, int64_t table_stride, void* q, void* kv,
                               int* page_table, int* seq_lens, float softmax_scale, int num_parts,
                               void* parts, int* num_splits, void* out, float* lse, float* partial_out,
                               float* partial_lse, cudaStream_t stream) {
    DenseAttnDecodeParams p{};
    p.b = batch;
    p.s_q = p.h_k = 1;
    p.h_q = p.q_seq_per_hk = p.q_head_per_hk = heads;
    p.d = kQkDim;
    p.d_v = kVDim;
    p.num_blocks = num_pages;
    p.scale_softmax = softmax_scale;
    p.scale_softmax_log2 = static_cast<float>(softmax_scale * M_LOG2E);
    p.q_ptr = q;
    p.k_ptr = kv;
    p.o_ptr = out;
    p.softmax_lse_ptr = lse;
    p.q_batch_stride = int64_t{heads} * kQkDim;
    p.k_batch_stride = kPageSize * kQkDim;
    p.o_batch_stride = p.o_head_stride = int64_t{heads} * kVDim;
    p.q_row_stride = p.q_head_stride = p.k_row_stride = p.k_head_stride = kQkDim;
    p.o_row_stride = kVDim;
    p.block_table = page_table;
    p.block_table_batch_stride = table_stride;
    p.page_block_size = kPageSize;
    p.seqlens_k_ptr = seq_lens;
    p.tile_scheduler_metadata_ptr = static_cast<DecodingSchedMeta*>(parts);
    p.num_sm_parts = num_parts;
    p.num_splits_ptr = num_splits;
    p.total_num_splits = batch + num_parts;
    p.softmax_lseaccum_ptr = partial_lse;
    p.oaccum_ptr = partial_out;
    p.stream = stream;
    sm90::run_flash_splitkv_mla_kernel<cutlass::bfloat16_t>(p);

    CombineParams c{};
    c.b = batch;
    c.s_q = 1;
    c.h_q = heads;
    c.d_v = kVDim;
    c.lse = lse;
    c.out = out;
    c.stride_lse_b = c.stride_lse_s_q = heads;
    c.stride_o_b = c.stride_o_s_q = heads * kVDim;
    c.stride_o_h_q = kVDim;
    c.lse_accum = partial_lse;
    c.o_accum = partial_out;
    c.stride_lse_accum_split = c.stride_lse_accum_s_q = heads;
    c.stride_o_accum_split = c.stride_o_accum_s_q = heads * kVDim;
    c.stride_o_accum_h_q = kVDim;
    c.tile_scheduler_metadata_ptr = p.tile_scheduler_metadata_ptr;
    c.num_splits_ptr = num_splits;
    c.num_sm_parts = num_parts;
    c.stream = stream;
    smxx::decode::run_flash_mla_combine_kernel<cutlass::bfloat16_t>(c);
    return cudaGetLastError();
}
