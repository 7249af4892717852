/* The C ABI: all that Python may call. Every function returns a status unless it says otherwise;
   raw pointers in, no framework types. A cache is named by a handle, never by an address. Calls may
   come from any thread: those on one cache take turns, and closing it while a call is in flight lets
   that call end; the memory goes with the last call. */
#pragma once
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#ifdef _WIN32
#define KVQ_EXPORT __declspec(dllexport)
#else
#define KVQ_EXPORT __attribute__((visibility("default")))
#endif

/* Counts changes of this file that a caller must know of. */
#define KVQ_ABI 30

enum kvq_status {
    KVQ_OK = 0,
    KVQ_SHORT = 1,      /* the pool cannot hold what is asked: demote or evict first */
    KVQ_BAD_ARGUMENT = 2,
    KVQ_NOT_FINITE = 3, /* a key or value is not finite or beyond float16 */
    KVQ_BAD_STATE = 4,  /* begin, attend and commit were called out of order */
    KVQ_NO_MEMORY = 5,
    KVQ_TOO_SMALL = 6,  /* the budget cannot hold the fixed part and one page */
    KVQ_CLOSED = 7,     /* no open cache has this handle */
    KVQ_DEVICE_FAILED = 8, /* a device failed; what it held is lost */
    KVQ_NOT_MAPPED = 9    /* what was asked to be a view of a file is none, or the system has no such views */
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
    int32_t probes;             /* 1: keep probe queries, so that evidence can be asked for; 1 + n: also those of n
                                   layers that read the last one's keys, in the order in which each pass looks; and
                                   KVQ_SAMPLES: of the whole text, not of the newest tokens alone */
    int32_t draft_tokens;       /* rows of the tail kept free for tokens that may be forgotten */
    int32_t value_groups;       /* of a page's values: 64, or head_dim if more and any form has KVQ_CHANNEL_VALUES */
    int32_t page_version;       /* of the pages' bytes: what the library writes, or it refuses */
    int32_t conv_layers;        /* convolutions beside the layers that attend; 0: none, then of all that follows */
    int32_t conv_width, conv_taps; /* channels, and rows that one is computed of, its own included */
    int32_t conv_checkpoints;   /* places that can be gone back to beside the newest tokens */
    int32_t delta_layers;       /* delta nets beside the layers that attend, if no convolutions are; 0: none, then of all that follows */
    int32_t delta_key_heads, delta_value_heads, delta_key_dim, delta_value_dim, delta_taps;
    int32_t delta_states;       /* places whose states are kept, 2 or more */
    int32_t delta_fold;         /* tokens after which rows are folded: what the library does, or it refuses */
} kvq_config;

enum { KVQ_SAMPLES = 1 << 20 };

/* How the pages of one (layer, KV head) are encoded, as bits. */
enum { KVQ_ROTATED_KEYS = 1, KVQ_CHANNEL_VALUES = 2 };

enum { KVQ_REGIONS = 22, KVQ_PLACES = 7, KVQ_CONV_STATE = 13, KVQ_DELTA_STATE = 15, KVQ_MOST_DRAFT_TOKENS = 128 };

typedef struct {
    int64_t fixed_bytes;        /* everything but pages */
    int64_t pool_bytes;
    int64_t granule_bytes, constant_bytes;
    int64_t minimum_bytes;      /* smallest budget that opens */
    int32_t max_columns;
    int32_t reserved;
    /* Bytes of what lies before the pages, in order: state, forms, entering, views, entries,
       constant_owners, granule_owners, places (KVQ_PLACES), tail, branch, probes, probe_rows, layers,
       conv_state (KVQ_CONV_STATE), conv_rows, delta_state (KVQ_DELTA_STATE), delta_rows, delta_states,
       staging_positions, staging, rope, partials. */
    int64_t regions[KVQ_REGIONS];
} kvq_layout;

typedef struct {
    int32_t columns, views, tokens, tail_rows, branch_rows; /* tail_rows: committed ones */
    int32_t reserved;
    int64_t used_bytes, peak_bytes;
    int64_t pages_seen, pages_read; /* by steps so far: pages of KV heads that queries could see */
    int64_t device_bytes;           /* the arena's on a device */
    int64_t offloaded_bytes;        /* pages' in the second tier now */
    int64_t streamed_bytes;         /* copied from there by the newest pass */
} kvq_stats;

/* How a cache reads. Steps, passes of at most draft_tokens rows: of a KV head's pages that a token
   can see the best `share` by max over the head's queries of sum q_d (mid_d) + |q_d| (half_d),
   where mid_d and half_d are the middle and half the span of a page's keys. `octaves` above 0 is
   for prompts too: a page weighs nothing for a query whose best key there stands so many octaves
   (binary orders) below the best of its floating-point keys, and its values need not be read. */
typedef struct { float share, octaves; } kvq_read;

typedef struct {
    int32_t layer, heads, kv_heads, head_dim;
    float scale, softcap, rope_factor, norm_eps;
    int32_t window_tokens, rotary_pairs;
} kvq_attention;

typedef struct { int32_t layer, head, column, k_bits, v_bits; } kvq_action;

/* Bytes [KVQ_REGIONS] of all that is no page, for a table of `columns` pages per (layer, KV head) and
   owners of what `pool_bytes` have room for. */
KVQ_EXPORT int kvq_regions_of(const kvq_config *config, int32_t columns, int64_t pool_bytes,
                              int64_t *regions);

/* How `budget_bytes` divide for a table of `columns` pages per (layer, KV head): from those that a draft
   closes to those of the whole context. */
KVQ_EXPORT int kvq_layout_of(const kvq_config *config, int64_t budget_bytes, int32_t columns,
                             kvq_layout *layout);

/* A device beside the processor, by the library of its kernels (cuda/kvq_cuda.h). `device` is its
   number, from 1 on, the same for the same path; KVQ_DEVICE_FAILED: `reason` says why not. */
typedef struct {
    char name[128], reason[256];
    int64_t memory_bytes, free_bytes; /* when it was opened */
    int64_t stream;             /* of CUDA, on which all its work is queued */
    int32_t capability;         /* 90: sm_90 */
    int32_t head_dims[8];       /* channels of heads that it attends to; then 0 */
} kvq_device;
KVQ_EXPORT int kvq_device_open(const char *path, int32_t *device, kvq_device *facts);
/* Of each row of logits [rows, columns], which lie on the device, the `count` best (1 to 256), best
   first and of equal ones the first; what is not a number counts as the best. `places` and `values`
   [rows, count] are the host's, and nothing else is copied to it. */
KVQ_EXPORT int kvq_device_best(int32_t device, const float *logits, int32_t rows, int32_t columns,
                               int32_t count, int32_t *places, float *values);

/* `columns`: as kvq_layout_of. `forms`: uint8 [layers, kv_heads], or NULL for all 0. `device`: where pages and rows lie and passes
   run, 0: here. `resident_columns`: the newest so many columns lie on the device, the others in the
   host's memory, from where passes bring them; 0: all of them. Pages in two tiers lose no bits.
   `file_bytes`: the last so many bytes of the arena are the first of the file whose descriptor is
   `file`, which may be closed then; pages fill them first. 0: none are. Not of a device's cache. */
KVQ_EXPORT int kvq_cache_open(const kvq_config *config, int64_t budget_bytes, int32_t columns,
                              const uint8_t *forms, int32_t device, int32_t resident_columns,
                              int32_t file, int64_t file_bytes, int64_t *handle);
KVQ_EXPORT int kvq_cache_close(int64_t handle);
KVQ_EXPORT int kvq_cache_stats(int64_t handle, kvq_stats *stats);

/* From now on passes read by `rule`; share 1 and octaves 0: everything, as at the beginning. */
KVQ_EXPORT int kvq_cache_read(int64_t handle, const kvq_read *rule);
/* Keys of pages that close from now on are rounded with it (kvq.reference.stored.carried): float32 [layers,
   kv_heads, head_dim, head_dim], 0 on and below the diagonals. It is not copied: it must stay where it
   is as long as the cache is open. NULL: without, as at the beginning. */
KVQ_EXPORT int kvq_cache_feed_back(int64_t handle, const float *feedback);

/* The branch: rows after the committed tokens, numbered from 0 as they were added, that may be forgotten. It
   holds at most draft_tokens rows; only a chunk of a prompt, into an empty branch and without
   `parents`, may bring more, up to chunk_tokens. A chunk that does not fit the tail closes pages layer
   by layer, so it must be committed whole.

   Bytes still missing (0: none) and columns still missing before `tokens` more rows can be kept. */
KVQ_EXPORT int kvq_cache_missing(int64_t handle, int32_t tokens, int64_t *bytes, int32_t *columns);
/* Adds a pass of `tokens` rows. parents[i] < the row's own number: the row it follows, -1: the last
   committed token; NULL: a chain that goes on from the newest row. A row sees the committed tokens,
   its ancestors and itself. `view` 0 reads pages as they are, 1 wider sides than 4 bits by
   their hi plane.
   `at`: the token that the branch's first row is, in a gap an edit left that has room for all its
   rows, never beside convolutions or delta nets; -1: it goes on from the end, or as the open branch
   does. `silent`: uint8 [layers], or NULL
   for none: layers in which the rows ask nothing; their keys and values are stored, `out` is zeros,
   and no probes are kept of such a pass. */
KVQ_EXPORT int kvq_cache_begin(int64_t handle, int32_t tokens, const int32_t *parents, int32_t view,
                               int32_t at, const uint8_t *silent);
/* One layer of the pass: qkv float32 [tokens, (heads + 2 kv_heads) * head_dim]; out float32 [tokens,
   heads * head_dim]. Every layer must have seen a pass before the next begins. `sink_logits` [heads], or
   NULL: of each head a logit of no token, which shares in its softmax and gives nothing. */
KVQ_EXPORT int kvq_cache_attend(int64_t handle, const kvq_attention *attention, int32_t tokens,
                                const float *qkv, const int64_t *positions, const float *inv_freq,
                                const float *q_norm, const float *k_norm,
                                const float *sink_logits, float *out);
/* One convolution of the pass: bcx float32 [tokens, 3 conv_width], weight [conv_width, conv_taps], out [tokens,
   conv_width]; kvq/reference/conv.py defines it. Every convolution must have seen a pass, one
   after the other, before the next begins. Of a pass of more than draft_tokens rows all can be kept, or that many at most. */
KVQ_EXPORT int kvq_cache_convolve(int64_t handle, int32_t layer, int32_t tokens, const float *bcx,
                                  const float *weight, float *out);
/* One delta net of the pass, as a convolution: rows float32 [tokens, convolved + value channels], gates
   [tokens, 2 delta_value_heads], conv [convolved channels, delta_taps], decay and dt_bias
   [delta_value_heads], scale [delta_value_dim], out [tokens, value channels]; kvq/reference/delta.py
   defines it. */
KVQ_EXPORT int kvq_cache_recur(int64_t handle, int32_t layer, int32_t tokens, const float *rows,
                               const float *gates, const float *conv, const float *decay,
                               const float *dt_bias, const float *scale, float norm_eps, float *out);
/* A layer that brings no keys and values and reads those of layer `attention->layer`, once every layer has seen
   the pass: q float32 [queries, heads * head_dim] of the pass's rows `rows` int64 [queries],
   chunk_tokens at most; out as large. Of a chunk that is longer than the tail only the last layer can be read so. Not on a device.
   Of a pass the i-th look at the last layer is that of the i-th reader. */
KVQ_EXPORT int kvq_cache_look(int64_t handle, const kvq_attention *attention, int32_t queries,
                              const int64_t *rows, const float *q, const float *inv_freq,
                              const float *q_norm, float *out);
/* From here on `stats`, which may be NULL, is what kvq_cache_stats would say after the call.
   Keeps the path `rows` (root first, each the parent of the next; NULL: the first `count` rows), forgets
   all others and closes full pages; a count of 0 forgets all. */
KVQ_EXPORT int kvq_cache_commit(int64_t handle, const int32_t *rows, int32_t count, kvq_stats *stats);
/* Keeps only the branch's first `rows` rows. No page and no committed row changes. */
KVQ_EXPORT int kvq_cache_rewind(int64_t handle, int32_t rows, kvq_stats *stats);
/* Goes back to the first `tokens` tokens, or to fewer where convolutions have forgotten what stood
   there. */
KVQ_EXPORT int kvq_cache_trim(int64_t handle, int32_t tokens, kvq_stats *stats);
/* Somebody will go back to the first `tokens` tokens, which may be still to come: what convolutions
   and delta nets remember there is kept before other places. Of two such places both are kept, of
   more the two that were marked, or gone back to, last. */
KVQ_EXPORT int kvq_cache_mark(int64_t handle, int32_t tokens);
/* Removes tokens start to stop and moves those behind so that `count` others can stand there, in a gap
   for begin(at=start). No page's bytes change: its views get masks and shifts, up to two views where
   there was one. Sinks do not move. KVQ_SHORT: there are too many views. */
KVQ_EXPORT int kvq_cache_edit(int64_t handle, int32_t start, int32_t stop, int32_t count,
                              kvq_stats *stats);

/* Widths only fall; 0, 0 evicts. Columns left without any page are removed. */
KVQ_EXPORT int kvq_cache_demote(int64_t handle, const kvq_action *actions, int32_t count,
                                kvq_stats *stats);
/* Lowers what the pages to come close at: uint8 [layers, kv_heads, 2], as kvq_cache_entering tells. */
KVQ_EXPORT int kvq_cache_demote_entering(int64_t handle, const uint8_t *widths);
/* How far a column's tokens, or the sinks, stand from where their keys were rotated. */
KVQ_EXPORT int kvq_cache_shift_sinks(int64_t handle, int32_t delta);
KVQ_EXPORT int kvq_cache_shift(int64_t handle, int32_t column, int32_t delta);
/* Hides the slots that `mask` leaves out, for good: what was rolled back does not come back. */
KVQ_EXPORT int kvq_cache_mask(int64_t handle, int32_t column, uint64_t mask);

/* `columns` and `rows` below are the counts the caller has room for: refused unless they are those of
   kvq_cache_stats.

   Column facts as int64 [columns, 4]: pos0, delta and first_token of the view that stands last, and what is
   visible in any; widths as uint8 [layers, kv_heads, columns, 2]. */
KVQ_EXPORT int kvq_cache_columns(int64_t handle, int32_t columns, int64_t *facts, uint8_t *widths);
/* Int64 [views, 5]: column, pos0, delta, first_token, mask. Slot i of a view is token first_token + i, its
   key rotated to position pos0 + i and standing delta further. */
KVQ_EXPORT int kvq_cache_views(int64_t handle, int32_t views, int64_t *facts);
/* Int64 [rows, 3] of the committed floating-point rows: token, position, how far it has moved. */
KVQ_EXPORT int kvq_cache_places(int64_t handle, int32_t rows, int64_t *places);
/* Widths the next pages close at, uint8 [layers, kv_heads, 2]. */
KVQ_EXPORT int kvq_cache_entering(int64_t handle, uint8_t *widths);
/* What probes among the first `tokens` tokens see of every page, of the last layer's what it and its readers
   see in sum (of weights of single tokens the largest; the queries are all of theirs): KVQ_EVIDENCE_FACTS float32 arrays [layers, kv_heads,
   columns], in the order of kvq_evidence_fact, and float32 [3, layers, kv_heads, head_dim]: means and
   mean squares of the queries, mean squares of their attention's output. Counts as one observation in the pages' histories. */
enum kvq_evidence_fact {
    KVQ_MASS, KVQ_RECENT_MASS, KVQ_TOTAL_MASS, KVQ_PEAK_WEIGHT, KVQ_MEAN_MASS, KVQ_KEY_ERROR,
    KVQ_VALUE_ERROR, KVQ_EVICT_ERROR, KVQ_EVIDENCE_FACTS
};
KVQ_EXPORT int kvq_cache_evidence(int64_t handle, int32_t tokens, int32_t columns, float *facts,
                                  float *queries);
/* Constants of a layer's pages, float32: keys [kv_heads, columns, 2, head_dim] and values
   [kv_heads, columns, 2, 64], scale before mid; 0 where a page is evicted. Of values on a grid of channels
   every token has the channels' root mean squares. */
KVQ_EXPORT int kvq_cache_constants(int64_t handle, int32_t layer, int32_t columns, float *keys,
                                   float *values);
/* Squared lengths of the keys of a layer's pages as they are read, float32 [kv_heads, columns, 64]; 0
   where a page is evicted. */
KVQ_EXPORT int kvq_cache_key_squares(int64_t handle, int32_t layer, int32_t columns, float *squares);
/* Copies one page's bytes: constants, then its granules in order; returns the byte count or -1. */
KVQ_EXPORT int64_t kvq_cache_page(int64_t handle, int32_t layer, int32_t head, int32_t column,
                                  uint8_t *bytes);
/* Committed floating-point rows, float16 [rows, head_dim] each, and their positions int32 [rows]. */
KVQ_EXPORT int kvq_cache_tail(int64_t handle, int32_t layer, int32_t head, int32_t rows, uint16_t *k,
                              uint16_t *v, int32_t *positions);

KVQ_EXPORT int64_t kvq_cache_state_bytes(int64_t handle);
KVQ_EXPORT int kvq_cache_save(int64_t handle, uint8_t *bytes, int64_t count);
KVQ_EXPORT int kvq_cache_load(int64_t handle, const uint8_t *bytes, int64_t count, kvq_stats *stats);

/* Encodes float32 [64, head_dim] as a page's keys (or `values`) on a grid of `channels` or of tokens: the
   grid, and the planes a side of `bits` bits holds, into room for those of 8 bits. `feedback`: as
   kvq_cache_feed_back has it, of one head and for a grid of channels, or NULL. */
KVQ_EXPORT int kvq_pack(int32_t values, int32_t channels, const float *x, int32_t head_dim, int32_t bits,
                        const float *feedback, uint8_t *planes, uint8_t *grid);

/* Weights. A matrix is stored as panels; kvq/reference/linear.py defines their bytes and every
   product's arithmetic. No pointer below is kept, none needs any alignment. */
/* With KVQ_CLAMPED_SWIGLU, for g = min(gate, 7) and u = min(max(up, -7), 7): g / (1 + exp(-1.702 g)) * (u + 1). */
enum kvq_activation { KVQ_PLAIN = 0, KVQ_SILU = 1, KVQ_GELU_TANH = 2, KVQ_CLAMPED_SWIGLU = 3 };
enum kvq_scoring { KVQ_SOFTMAX = 0, KVQ_SIGMOID = 1 };
enum kvq_view { KVQ_FULL = 0, KVQ_HI = 1 }; /* KVQ_HI: of codes the upper four bits at most */
enum kvq_grid {
    KVQ_SYMMETRIC = 0, KVQ_ZERO_POINT = 1, KVQ_MINIMUM = 2, KVQ_E2M1 = 3,
    KVQ_SUPER_MINIMUM = 4, KVQ_SUPER_SYMMETRIC = 5 /* `block` is that of a sub-block */
};

typedef struct { int32_t rows, columns, bits, block, grid; } kvq_matrix;

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
    int32_t exact_rows;     /* 0: all; else the view KVQ_HI, exact in what may be the best so many */
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

/* out = residual + for every token the sum over its `chosen` experts of share * (down . (activation(gate
   half) * up half of gate_up . x + gate_up_bias) + down_bias). Experts and shares come of `logits`: those with the
   largest softmax, or sigmoid and `choice_bias` together; shares are these without that, divided by their sum where
   `normalised`. A matrix is that of one expert, of whole panels,
   and its panels those of all, one expert's behind the other's. kvq/reference/experts.py defines it.
   `residency`: which experts stay in memory, by a handle; 0: the system decides. */
typedef struct {
    kvq_matrix gate_up, down; /* [2 * width, columns] and [columns, width] */
    const uint8_t *gate_up_panels, *down_panels;
    const float *x;           /* [tokens, columns] */
    const float *logits;      /* [tokens, count] */
    const float *residual;    /* [tokens, columns], or NULL */
    const float *gate_up_bias, *down_bias; /* [count, 2 * width] and [count, columns], or NULL */
    const float *choice_bias; /* [count], or NULL; of KVQ_SIGMOID alone */
    float *out;               /* [tokens, columns] */
    int32_t tokens, count, chosen, normalised, activation, view, scoring;
    int64_t residency;
} kvq_experts;
KVQ_EXPORT int kvq_experts_run(const kvq_experts *call);

/* Bounds the memory that the experts of one model take: their panels must be views of a file, mapped for
   reading, and those of one layer always come with the same shapes. Of those in memory the ones chosen least often leave it before another is read. One expert
   alone may take more than the budget, and what the system brings along with it is there while it is read. */
typedef struct {
    int64_t budget_bytes;
    int64_t held_bytes; /* in memory, whole pages */
    int64_t chosen;     /* experts that passes have chosen, once for each layer of each pass */
    int64_t fetched;    /* of these, experts that were not in memory */
} kvq_residency_stats;
KVQ_EXPORT int kvq_residency_open(int64_t budget_bytes, int64_t *handle);
KVQ_EXPORT int kvq_residency_close(int64_t handle);
KVQ_EXPORT int kvq_residency_stats_of(int64_t handle, kvq_residency_stats *stats);

/* How products ask memory for the weights that come next; no result depends on it. second_level: 1 one
   row's into the second-level cache alone, 0 into the first too, -1 as the processor's maker has it. ahead_bytes: how far ahead,
   0 by the matrix. */
#define KVQ_MOST_AHEAD (1 << 20)
KVQ_EXPORT int kvq_tune(int32_t second_level, int64_t ahead_bytes);

/* What products do where kvq_tune said nothing else, by what the processor says of itself. */
typedef struct {
    char maker[16];        /* as CPUID spells it, such as "GenuineIntel"; or empty */
    int64_t level2_bytes;  /* of the second-level cache that a core reads through; 0: not known */
} kvq_processor;
typedef struct {
    int32_t second_level;   /* whether one row's weights are fetched into the second-level cache alone */
    int64_t ahead_bytes;   /* how far ahead weights are fetched, */
    int64_t panel_bytes;   /* but of panels up to so large the same place of the next one */
    int64_t row_bytes;     /* of rounded rows that stay in the cache while panels pass by */
} kvq_built_in;
KVQ_EXPORT int kvq_processor_of(kvq_processor *here);
KVQ_EXPORT int kvq_built_in_of(const kvq_processor *processor, kvq_built_in *out);

/* Bytes of weights read by products since the library was loaded. */
KVQ_EXPORT int64_t kvq_weight_bytes_read(void);

/* One sentence per status, for users; a static string. */
KVQ_EXPORT const char *kvq_status_text(int status);
KVQ_EXPORT int kvq_abi(void);                      /* KVQ_ABI */
KVQ_EXPORT const char *kvq_isa(void);              /* name of the kernels in use */
KVQ_EXPORT const char *kvq_isa_available(void);    /* names this machine can run, comma separated */
KVQ_EXPORT int kvq_isa_select(const char *name);   /* of the whole process, between passes: none may run */
/* `name: why` of kernels that the processor announces and that were tried and are not offered; or empty. */
KVQ_EXPORT const char *kvq_isa_refused(void);

#ifdef __cplusplus
}
#endif
