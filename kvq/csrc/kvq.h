/* The C ABI: all that Python may call. Every function returns a status unless it says otherwise;
   raw pointers in, no framework types. A cache is named by a handle, never by an address. */
#pragma once
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define KVQ_EXPORT __attribute__((visibility("default")))

/* Counts changes of this file that a caller must know of. */
#define KVQ_ABI 4

enum kvq_status {
    KVQ_OK = 0,
    KVQ_SHORT = 1,      /* the pool cannot hold what is asked: demote or evict first */
    KVQ_BAD_ARGUMENT = 2,
    KVQ_NOT_FINITE = 3, /* a key or value is not finite or beyond float16 */
    KVQ_BAD_STATE = 4,  /* begin, attend and commit were called out of order */
    KVQ_NO_MEMORY = 5,
    KVQ_TOO_SMALL = 6   /* the budget cannot hold the fixed part and one page */
};

typedef struct {
    int32_t layers, heads, kv_heads, head_dim;
    int32_t k_bits, v_bits;     /* most a page is closed at; 16 and 16 close none */
    int32_t sink_tokens;
    int32_t tail_tokens;        /* newest tokens that never lie in pages */
    int32_t tail_rows;          /* floating-point rows per (layer, head), sinks included */
    int32_t chunk_tokens;       /* most tokens of one forward that does not fit the tail */
    int32_t context_tokens;     /* most tokens a session will ever hold */
    int32_t splits;             /* parts a KV head's pages are divided into for threads */
    int32_t probes;             /* 1: keep probe queries, so that evidence can be asked for */
    int32_t draft_tokens;       /* rows of the tail kept free for tokens that may be forgotten */
} kvq_config;

enum { KVQ_REGIONS = 15, KVQ_MOST_DRAFT_TOKENS = 128 };

typedef struct {
    int64_t fixed_bytes;        /* everything but pages */
    int64_t pool_bytes;
    int64_t granule_bytes, constant_bytes;
    int64_t minimum_bytes;      /* smallest budget that opens */
    int32_t max_columns;
    int32_t reserved;
    int64_t regions[KVQ_REGIONS]; /* bytes of what lies before the pages, in order: kvq.sizing.Regions */
} kvq_layout;

typedef struct {
    int32_t columns, tokens, tail_rows, pending;
    int64_t used_bytes, peak_bytes, used_granules, used_constants;
    int32_t broken, reserved;
} kvq_stats;

typedef struct {
    int32_t layer, heads, kv_heads, head_dim;
    float scale, softcap, rope_factor, norm_eps;
    int32_t window_tokens, rotary_pairs;
} kvq_attention;

typedef struct { int32_t layer, head, column, k_bits, v_bits; } kvq_action;

KVQ_EXPORT int kvq_layout_of(const kvq_config *config, int64_t budget_bytes, kvq_layout *layout);
KVQ_EXPORT int kvq_cache_open(const kvq_config *config, int64_t budget_bytes, int64_t *handle);
KVQ_EXPORT int kvq_cache_close(int64_t handle);
KVQ_EXPORT int kvq_cache_stats(int64_t handle, kvq_stats *stats);

/* Bytes still missing (0: none) and columns still missing before `tokens` more can be taken. */
KVQ_EXPORT int kvq_cache_missing(int64_t handle, int32_t tokens, int64_t *bytes, int32_t *columns);
KVQ_EXPORT int kvq_cache_begin(int64_t handle, int32_t tokens);
/* qkv float32 [tokens, (heads + 2 kv_heads) * head_dim]; out float32 [tokens, heads * head_dim]. */
KVQ_EXPORT int kvq_cache_attend(int64_t handle, const kvq_attention *attention, int32_t tokens,
                                const float *qkv, const int64_t *positions, const float *inv_freq,
                                const float *q_norm, const float *k_norm, float *out);
KVQ_EXPORT int kvq_cache_commit(int64_t handle, int32_t tokens);
KVQ_EXPORT int kvq_cache_abort(int64_t handle);
KVQ_EXPORT int kvq_cache_trim(int64_t handle, int32_t tokens);

/* Widths only fall; 0, 0 evicts. Columns left without any page are removed. The column after the last
   stands for the pages that will close from now on: what is asked of it is what they close at. */
KVQ_EXPORT int kvq_cache_demote(int64_t handle, const kvq_action *actions, int32_t count);
KVQ_EXPORT int kvq_cache_shift(int64_t handle, int32_t column, int32_t delta);
KVQ_EXPORT int kvq_cache_mask(int64_t handle, int32_t column, uint64_t mask);

/* Column facts as int64 [columns, 4]: pos0, delta, first_token, mask; widths as uint8
   [layers, kv_heads, columns, 2]. */
KVQ_EXPORT int kvq_cache_columns(int64_t handle, int64_t *facts, uint8_t *widths);
/* Widths the next pages close at, uint8 [layers, kv_heads, 2]. */
KVQ_EXPORT int kvq_cache_entering(int64_t handle, uint8_t *widths);
/* What the newest probes among the first `tokens` tokens see of every page: KVQ_EVIDENCE_FACTS float32 arrays [layers, kv_heads,
   columns], in the order of kvq_evidence_fact, and float32 [3, layers, kv_heads, head_dim]: means and
   mean squares of the queries, mean squares of their attention's output. Counts as one observation in the pages' histories. */
enum kvq_evidence_fact {
    KVQ_MASS, KVQ_PEAK_MASS, KVQ_MEAN_MASS, KVQ_KEY_ERROR, KVQ_VALUE_ERROR, KVQ_EVICT_ERROR,
    KVQ_EVIDENCE_FACTS
};
KVQ_EXPORT int kvq_cache_evidence(int64_t handle, int32_t tokens, float *facts, float *queries);
/* Every page's constants as stored, float16: keys [layers, kv_heads, columns, 2, head_dim] and
   values [layers, kv_heads, columns, 2, 64], scale before min; 0 where a page is evicted. */
KVQ_EXPORT int kvq_cache_constants(int64_t handle, uint16_t *keys, uint16_t *values);
/* Copies one page's bytes: constants, then its granules in order; returns the byte count or -1. */
KVQ_EXPORT int64_t kvq_cache_page(int64_t handle, int32_t layer, int32_t head, int32_t column,
                                  uint8_t *bytes);
/* Floating-point rows, float16 [rows, head_dim] each, and their positions int32 [rows]. */
KVQ_EXPORT int kvq_cache_tail(int64_t handle, int32_t layer, int32_t head, uint16_t *k, uint16_t *v,
                              int32_t *positions);

KVQ_EXPORT int64_t kvq_cache_state_bytes(int64_t handle);
KVQ_EXPORT int kvq_cache_save(int64_t handle, uint8_t *bytes);
KVQ_EXPORT int kvq_cache_load(int64_t handle, const uint8_t *bytes, int64_t count);

/* Encodes float32 [tokens, head_dim] (tokens <= 64) as 8-bit planes: hi4, lo4, then constants. */
KVQ_EXPORT int kvq_pack(int32_t values, const float *x, int32_t tokens, int32_t head_dim,
                        uint8_t *planes, uint16_t *constants);
/* Repacks a hi4 plane of 32*head_dim bytes into the 2-bit plane at its start. */
KVQ_EXPORT int kvq_repack(uint8_t *plane, int32_t head_dim);

/* Weights. A matrix is stored as panels; kvq/reference_linear.py defines their bytes and every
   product's arithmetic. No pointer below is kept, none needs any alignment. */
enum kvq_activation { KVQ_PLAIN = 0, KVQ_SILU = 1, KVQ_GELU_TANH = 2 };
enum kvq_view { KVQ_FULL = 0, KVQ_HI = 1 }; /* KVQ_HI: of an 8-bit matrix the upper nibbles alone */

typedef struct { int32_t rows, columns, bits, block; } kvq_matrix;

/* out = residual + bias + weights . input, where input is x, its RMS norm (`norm` given), or
   activation(first half of x) * second half. Optional pointers are NULL. */
typedef struct {
    kvq_matrix matrix;
    const uint8_t *panels;
    const float *x;         /* [tokens, columns], or [tokens, 2 * columns] with an activation */
    const float *norm;      /* [columns] */
    const float *bias;      /* [rows] */
    const float *residual;  /* [tokens, rows] */
    float *out;             /* [tokens, rows] */
    int32_t tokens, activation, view;
    int32_t exact_panels;   /* 0: all; else the view KVQ_HI, exact in each token's best panels */
    int32_t first_row;      /* rows before it are left out: residual or 0, nothing read */
    float norm_eps;
} kvq_linear;
KVQ_EXPORT int kvq_linear_run(const kvq_linear *call);

/* out [tokens, columns] = sum over k of weights[t, k] * row ids[t, k] of the matrix. */
typedef struct {
    kvq_matrix matrix;
    const uint8_t *panels;
    const int64_t *ids;     /* [tokens, mixed] */
    const float *weights;   /* [tokens, mixed] */
    float *out;
    int32_t tokens, mixed;
} kvq_embed;
KVQ_EXPORT int kvq_embed_run(const kvq_embed *call);

/* Bytes of weights read by products since the library was loaded. */
KVQ_EXPORT int64_t kvq_weight_bytes_read(void);

KVQ_EXPORT int kvq_abi(void);                      /* KVQ_ABI */
KVQ_EXPORT const char *kvq_isa(void);              /* name of the kernels in use */
KVQ_EXPORT const char *kvq_isa_available(void);    /* names this machine can run, comma separated */
KVQ_EXPORT int kvq_isa_select(const char *name);

#ifdef __cplusplus
}
#endif
