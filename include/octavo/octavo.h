/* Octavo for C, and for what calls C: Rust, Go, Zig, Python's ctypes.
 *
 * The operators of attention.h, paged_attention.h, linear.h, rms_norm.h and latent_attention.h and the
 * allocator of page_allocator.h, which say what each argument means. Fill an argument struct with its
 * ..._init function, which sets the defaults, then set what you need. A struct of another version's size is
 * refused.
 *
 * Functions return OCTAVO_OK or what went wrong; octavo_last_error() then has the message. No C++ exception
 * leaves them. Every function may be called from any thread.
 *
 * Link liboctavo.so, or liboctavo.a and the C++ runtime (find_package(octavo) knows how), or load the Python
 * package's extension module (octavo._core.__file__) into a Python process. */
#ifndef OCTAVO_OCTAVO_H
#define OCTAVO_OCTAVO_H

#include <stddef.h>
#include <stdint.h>

#define OCTAVO_API __attribute__((visibility("default")))

#ifdef __cplusplus
extern "C" {
#endif

typedef enum octavo_status {
    OCTAVO_OK = 0,
    OCTAVO_VALUE_ERROR = 1,  /* a shape or value that does not fit */
    OCTAVO_TYPE_ERROR = 2,   /* a dtype that does not fit */
    OCTAVO_DEVICE_ERROR = 3, /* arrays on several devices, no usable driver, a failed CUDA call */
    OCTAVO_OUT_OF_PAGES = 4, /* the allocator is as before the call */
    OCTAVO_INVALID_SEQUENCE = 5,
    OCTAVO_OUT_OF_MEMORY = 6,
    OCTAVO_ERROR = 7 /* any other */
} octavo_status;

/* The message of this thread's last call that failed. It lives until the next one that fails. */
OCTAVO_API const char* octavo_last_error(void);
OCTAVO_API const char* octavo_version(void); /* "0.2.0" */

typedef enum octavo_dtype {
    OCTAVO_FLOAT32 = 0,
    OCTAVO_FLOAT16 = 1,
    OCTAVO_BFLOAT16 = 2,
    OCTAVO_INT32 = 3,
    OCTAVO_INT8 = 4,
    OCTAVO_FLOAT8_E4M3FN = 5,
    OCTAVO_FLOAT8_E5M2 = 6,
    OCTAVO_UINT8 = 7,
    OCTAVO_INT4 = 8, /* no array's: what pages of uint8 may hold, by kv_dtype */
    OCTAVO_INT64 = 9
} octavo_dtype;

typedef enum octavo_activation { OCTAVO_SILU = 0, OCTAVO_GELU = 1, OCTAVO_SILU_GATE = 2 } octavo_activation;

typedef enum octavo_device_type { OCTAVO_CPU = 0, OCTAVO_CUDA = 1 } octavo_device_type;

/* A borrowed array. A tensor without data and without shape is an argument that is not given; an empty array
 * needs no data. */
typedef struct octavo_tensor {
    void* data;
    const int64_t* shape;   /* [ndim], in elements */
    const int64_t* strides; /* [ndim], in elements; null: C order */
    int32_t ndim;
    int32_t dtype;        /* octavo_dtype */
    int32_t device_type;  /* octavo_device_type */
    int32_t device_index; /* of the GPU */
} octavo_tensor;

typedef struct octavo_attention_args {
    size_t struct_size; /* set by octavo_attention_args_init */
    octavo_tensor q, k, v, out;
    octavo_tensor lse, cu_seqlens_q, cu_seqlens_k, prefix_lens, alibi_slopes; /* optional */
    octavo_tensor sinks;                                                      /* optional: [num_q_heads] */
    octavo_tensor softmax_phi_array;                                          /* instead of softmax_phi */
    int64_t max_seqlen_q, max_seqlen_k;                                       /* default: -1, chosen */
    double softmax_scale;               /* default: NaN, 1 / sqrt(head_dim) */
    double softcap;                     /* default: 0, none */
    int64_t window_left, window_right;  /* default: -1, unbounded */
    int64_t attention_chunk;            /* default: 0, none */
    double dropout_p;                   /* default: 0, none */
    int64_t dropout_seed;               /* default: -1, none; needed if dropout_p > 0 */
    int64_t dropout_offset;             /* default: 0 */
    double softmax_phi;                 /* default: NaN, none */
    octavo_tensor block_mask;           /* optional: uint8 [heads, query blocks, key blocks] */
    octavo_tensor bidirectional_ranges; /* optional: [batch, num_ranges, 2] */
    int64_t block_size;                 /* default: 128; or 64 */
    int32_t causal;                     /* default: 0 */
    int32_t alibi_symmetric;            /* default: 0 */
    int32_t ranges_keep_window_left;    /* default: 0 */
    void* stream;                       /* cudaStream_t; default: null */
} octavo_attention_args;

typedef struct octavo_paged_attention_args {
    size_t struct_size;
    octavo_tensor q, k_pages, v_pages, page_table, seq_lens, out;
    octavo_tensor lse, cu_seqlens_q, prefix_lens, alibi_slopes; /* optional */
    octavo_tensor sinks;                                        /* optional: [num_q_heads] */
    octavo_tensor k_scale_array, v_scale_array;                 /* optional: instead of k_scale, v_scale */
    octavo_tensor k_scales, v_scales;                           /* optional: of each token and KV head */
    octavo_tensor k_channel_offset, k_channel_scale;            /* optional: as for append_kv */
    octavo_tensor softmax_phi_array;                            /* optional: instead of softmax_phi */
    octavo_tensor tree_mask;                                    /* optional: int64 [total_q] */
    octavo_tensor chosen_pages;                                 /* optional: [batch, KV heads, num_chosen] */
    octavo_tensor bidirectional_ranges;                         /* optional: [batch, num_ranges, 2] */
    int64_t max_seqlen_q;                                       /* default: -1, chosen */
    double softmax_scale;                                       /* default: NaN, 1 / sqrt(head_dim) */
    double softcap;                                             /* default: 0, none */
    int64_t window_left, window_right;                          /* default: -1, unbounded */
    int64_t attention_chunk;                                    /* default: 0, none */
    int64_t num_splits;                                         /* default: -1, chosen */
    int64_t shared_prefix_len;                                  /* default: 0 */
    double softmax_phi;                                         /* default: NaN, none */
    int32_t causal;                                             /* default: 1 */
    int32_t alibi_symmetric;                                    /* default: 0 */
    int32_t ranges_keep_window_left;                            /* default: 0 */
    int32_t batch_invariant;                                    /* default: 0 */
    int32_t rotate_keys;                                        /* default: 0 */
    int32_t static_past;                                        /* default: 0 */
    int32_t kv_dtype;                                           /* octavo_dtype; default: -1, none */
    float k_scale, v_scale;                                     /* default: 1, none; 1 itself by array */
    void* stream;                                               /* cudaStream_t; default: null */
} octavo_paged_attention_args;

typedef struct octavo_append_kv_args {
    size_t struct_size;
    octavo_tensor k, v, k_pages, v_pages;
    octavo_tensor page_table, seq_lens;         /* both, or slot_mapping */
    octavo_tensor cu_seqlens;                   /* optional */
    octavo_tensor k_scale_array, v_scale_array; /* optional: instead of k_scale, v_scale */
    octavo_tensor k_scales, v_scales;           /* optional: of each token and KV head; written */
    /* Optional, for codes: [num_kv_heads, head_dim]; what becomes a code is (k - offset) / scale, rotated. */
    octavo_tensor k_channel_offset, k_channel_scale;
    octavo_tensor rotary_cos, rotary_sin; /* optional: [max_positions, rotary_dim / 2] */
    octavo_tensor q, q_out;               /* optional: queries to rotate as well, and where they go */
    octavo_tensor slot_mapping;           /* instead of page_table and seq_lens: [total], -1 skips */
    int32_t rotary_interleaved;           /* default: 0 */
    int32_t static_tables;                /* default: 0 */
    int32_t rotate_keys;                  /* default: 0 */
    int32_t kv_dtype;                     /* octavo_dtype; default: -1, none */
    float k_scale, v_scale;               /* default: 1, none; 1 itself by array */
    void* stream;                         /* cudaStream_t; default: null */
} octavo_append_kv_args;

typedef struct octavo_copy_pages_args {
    size_t struct_size;
    octavo_tensor k_pages, v_pages, copies;
    octavo_tensor to_k_pages, to_v_pages;   /* optional: another cache that gets the copies */
    octavo_tensor k_scales, v_scales;       /* optional: of each token and KV head */
    octavo_tensor to_k_scales, to_v_scales; /* optional: those of the other cache */
    void* stream;                           /* cudaStream_t; default: null */
} octavo_copy_pages_args;

typedef struct octavo_attention_backward_args {
    size_t struct_size;
    octavo_tensor dout, q, k, v, out, lse, dq, dk, dv;
    octavo_tensor dlse, dalibi_slopes, dsinks;                                  /* optional */
    octavo_tensor cu_seqlens_q, cu_seqlens_k, prefix_lens, alibi_slopes, sinks; /* optional */
    int64_t max_seqlen_q, max_seqlen_k;                                         /* default: -1, chosen */
    double softmax_scale;               /* default: NaN, 1 / sqrt(head_dim) */
    double softcap;                     /* default: 0, none */
    int64_t window_left, window_right;  /* default: -1, unbounded */
    int64_t attention_chunk;            /* default: 0, none */
    double dropout_p;                   /* default: 0, none */
    int64_t dropout_seed;               /* default: -1, none; needed if dropout_p > 0 */
    int64_t dropout_offset;             /* default: 0 */
    octavo_tensor block_mask;           /* optional: uint8 [heads, query blocks, key blocks] */
    octavo_tensor bidirectional_ranges; /* optional: [batch, num_ranges, 2] */
    int64_t block_size;                 /* default: 128; or 64 */
    int32_t causal;                     /* default: 0 */
    int32_t alibi_symmetric;            /* default: 0 */
    int32_t ranges_keep_window_left;    /* default: 0 */
    int32_t deterministic;              /* default: 0 */
    void* stream;                       /* cudaStream_t; default: null */
} octavo_attention_backward_args;

typedef struct octavo_linear_args {
    size_t struct_size;
    octavo_tensor x, w, out;
    octavo_tensor bias, residual, norm_weight; /* optional */
    double norm_eps;                           /* default: 1e-6 */
    int32_t activation;                        /* octavo_activation; default: -1, none */
    int32_t static_weight;                     /* default: 0 */
    int32_t batch_invariant;                   /* default: 0 */
    void* stream;                              /* cudaStream_t; default: null */
} octavo_linear_args;

typedef struct octavo_rms_norm_args {
    size_t struct_size;
    octavo_tensor x, weight, out;
    octavo_tensor residual, residual_out; /* optional: both or neither */
    double eps;                           /* default: 1e-6 */
    void* stream;                         /* cudaStream_t; default: null */
} octavo_rms_norm_args;

typedef struct octavo_latent_attention_args {
    size_t struct_size;
    octavo_tensor q, kv_pages, page_table, seq_lens, out;
    octavo_tensor lse, cu_seqlens_q; /* optional */
    int64_t v_dim;                   /* default: 512 */
    int64_t max_seqlen_q;            /* default: -1, chosen */
    double softmax_scale;            /* must be set */
    int64_t num_splits;              /* default: -1, chosen */
    int32_t causal;                  /* default: 1 */
    float kv_scale;                  /* default: 1, none */
    void* stream;                    /* cudaStream_t; default: null */
} octavo_latent_attention_args;

OCTAVO_API octavo_status octavo_attention_args_init(octavo_attention_args* args);
OCTAVO_API octavo_status octavo_paged_attention_args_init(octavo_paged_attention_args* args);
OCTAVO_API octavo_status octavo_append_kv_args_init(octavo_append_kv_args* args);
OCTAVO_API octavo_status octavo_copy_pages_args_init(octavo_copy_pages_args* args);
OCTAVO_API octavo_status octavo_attention_backward_args_init(octavo_attention_backward_args* args);
OCTAVO_API octavo_status octavo_linear_args_init(octavo_linear_args* args);
OCTAVO_API octavo_status octavo_rms_norm_args_init(octavo_rms_norm_args* args);
OCTAVO_API octavo_status octavo_latent_attention_args_init(octavo_latent_attention_args* args);

OCTAVO_API octavo_status octavo_attention(const octavo_attention_args* args);
OCTAVO_API octavo_status octavo_paged_attention(const octavo_paged_attention_args* args);
OCTAVO_API octavo_status octavo_append_kv(const octavo_append_kv_args* args);
OCTAVO_API octavo_status octavo_copy_pages(const octavo_copy_pages_args* args);
OCTAVO_API octavo_status octavo_merge_states(const octavo_tensor* out_a, const octavo_tensor* lse_a,
                                             const octavo_tensor* out_b, const octavo_tensor* lse_b,
                                             const octavo_tensor* out, const octavo_tensor* lse,
                                             void* stream);
OCTAVO_API octavo_status octavo_attention_backward(const octavo_attention_backward_args* args);
OCTAVO_API octavo_status octavo_linear(const octavo_linear_args* args);
OCTAVO_API octavo_status octavo_rms_norm(const octavo_rms_norm_args* args);
OCTAVO_API octavo_status octavo_latent_attention(const octavo_latent_attention_args* args);

typedef struct octavo_page_allocator octavo_page_allocator;
typedef uint64_t octavo_sequence; /* a handle; one whose sequence was freed is refused */

OCTAVO_API octavo_status octavo_page_allocator_new(int64_t num_pages, int64_t page_size,
                                                   octavo_page_allocator** allocator);
OCTAVO_API void octavo_page_allocator_delete(octavo_page_allocator* allocator); /* null is fine */
OCTAVO_API octavo_status octavo_page_allocator_create(octavo_page_allocator* allocator,
                                                      octavo_sequence* sequence);
/* n more tokens, all or nothing: OCTAVO_OUT_OF_PAGES leaves all as it was. */
OCTAVO_API octavo_status octavo_page_allocator_extend(octavo_page_allocator* allocator,
                                                      octavo_sequence sequence, int64_t n);
/* n sequences that share every page of this one. All of them but the last to grow copy a last page that is
 * not full. */
OCTAVO_API octavo_status octavo_page_allocator_fork(octavo_page_allocator* allocator,
                                                    octavo_sequence sequence, int64_t n,
                                                    octavo_sequence* forks); /* [n], written */
/* Drops tokens at the end. */
OCTAVO_API octavo_status octavo_page_allocator_truncate(octavo_page_allocator* allocator,
                                                        octavo_sequence sequence, int64_t length);
OCTAVO_API octavo_status octavo_page_allocator_free(octavo_page_allocator* allocator,
                                                    octavo_sequence sequence);
OCTAVO_API octavo_status octavo_page_allocator_length(const octavo_page_allocator* allocator,
                                                      octavo_sequence sequence, int64_t* length);
/* The columns that a page table of these sequences needs. */
OCTAVO_API octavo_status octavo_page_allocator_max_pages(const octavo_page_allocator* allocator,
                                                         const octavo_sequence* sequences, int64_t count,
                                                         int64_t* max_pages);
/* page_table [count, max_pages] and seq_lens [count] are written. */
OCTAVO_API octavo_status octavo_page_allocator_page_table(const octavo_page_allocator* allocator,
                                                          const octavo_sequence* sequences, int64_t count,
                                                          int32_t* page_table, int64_t max_pages,
                                                          int32_t* seq_lens);
/* The tokens in whole pages that all of these sequences begin with, at least num_queries tokens of each lying
 * behind them: shared_prefix_len of octavo_paged_attention_args. */
OCTAVO_API octavo_status octavo_page_allocator_shared_prefix_len(const octavo_page_allocator* allocator,
                                                                 const octavo_sequence* sequences,
                                                                 int64_t count, int64_t num_queries,
                                                                 int64_t* shared_prefix_len);
/* Takes the copies that copy-on-write still has to make: *count of them, as (from, to) pairs that live until
 * the allocator's next call of this function, for which threads must take turns. */
OCTAVO_API octavo_status octavo_page_allocator_take_copies(octavo_page_allocator* allocator,
                                                           const int32_t** copies, int64_t* count);
/* -1 where it fails: a null allocator. */
OCTAVO_API int64_t octavo_page_allocator_num_free_pages(const octavo_page_allocator* allocator);

#ifdef __cplusplus
}
#endif

#endif
