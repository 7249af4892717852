/* The C ABI of the kernels for CUDA: every pointer but those to the structures themselves is the
   device's, every call queues work on `stream` and returns at once. Pages, grids and panels have
   the bytes of the CPU's (format.h, kvq/reference/linear.py), so a cache that was filled on one
   device goes on on the other. What is decided about pages (widths, evictions, edits) is decided on
   the host; these are told. */
#pragma once
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Every call returns a kvq_status of kvq.h; of KVQ_DEVICE_FAILED this is the reason, until the
   thread's next call that fails. */
const char* kvq_cuda_error(void);
int kvq_cuda_abi(void); /* KVQ_ABI of kvq.h as this library was compiled */

typedef struct {
    char name[128];
    int64_t memory_bytes, free_bytes;
    int32_t capability; /* 90: sm_90 */
    int32_t units;      /* multiprocessors */
    int32_t on_host;    /* 1: the emulator, whose memory is the host's */
    int32_t head_dims[8]; /* channels of heads that attention has kernels for; then 0 */
    void* stream;       /* made by kvq_cuda_open, for everything, in order */
    void* copies;       /* beside it, for copies that need not wait for it; kvq_cuda_after */
} kvq_cuda_device;
/* The first device. */
int kvq_cuda_open(kvq_cuda_device* device);

/* Memory is not cleared. KVQ_NO_MEMORY: there is not so much. */
int kvq_cuda_allocate(int64_t bytes, void** memory);
void kvq_cuda_free(void* memory);
/* Likewise of the host, where the device copies from and to by itself: what is copied there must
   stay as it is until the copy is done. */
int kvq_cuda_allocate_host(int64_t bytes, void** memory);
void kvq_cuda_free_host(void* memory);
/* `rows` rows of row_bytes, as far apart as the steps say, in any direction between host and
   device; nothing where there is nothing to copy. The host's memory may be used again on return,
   unless kvq_cuda_allocate_host gave it. */
int kvq_cuda_copy(void* to, int64_t to_step, const void* from, int64_t from_step, int64_t row_bytes,
                  int64_t rows, void* stream);
int kvq_cuda_clear(void* at, int64_t bytes, void* stream);
/* Until what was queued is done. */
int kvq_cuda_wait(void* stream);
/* What is queued on the stream `later` from now on begins when all that `earlier` was asked so far is
   done. */
int kvq_cuda_after(void* later, void* earlier);

/* ONNX Runtime asks the library for RegisterCustomOps; `add(options, base, user)` answers. */
typedef void* (*kvq_cuda_add_ops)(void* options, const void* base, void* user);
void kvq_cuda_set_ops(kvq_cuda_add_ops add, void* user);

typedef struct {
    int32_t heads, kv_heads, head_dim, rotary_pairs;
    float scale, softcap, rope_factor, norm_eps;
    int32_t window_tokens; /* 0: none */
    int32_t splits;        /* parts that a KV head's pages are divided into */
} kvq_cuda_attention;

/* What steps have read so far: pages of KV heads that tokens could see and those they read, and bytes
   of pages that came from the host. */
typedef struct {
    int64_t seen, read, fetched_bytes;
} kvq_cuda_counts;

/* One layer of one sequence. Row r of a KV head is query head r % (heads / kv_heads) of token r /
 * (heads / kv_heads). */
typedef struct {
    int32_t tokens;
    int32_t view_count, most_columns;
    int32_t tail_rows,
        tail_stride;   /* float16 rows to attend to, the pass's own last; rows there is room for */
    int32_t turns;     /* sets of queries beside those as they are: of distinct shifts */
    int32_t row_turns; /* the first of them, for rows of the tail that have moved */
    int32_t tiles;     /* visits to up to 64 of the tail's rows */
    int32_t hi_view;   /* 1: wider sides than 4 bits are read by their hi plane */
    int64_t pool_bytes, constant_bytes, granule_bytes;
    const uint8_t* pool;
    const void* entries;         /* Entry [kv_heads, most_columns] of format.h */
    const void* views;           /* View [view_count] */
    const int32_t* turn_of_view; /* [view_count] */
    const int32_t* deltas;       /* [turns]: how far what meets a turn has moved */
    const int32_t* tile_rows;    /* [tiles]: the tile of 64 rows a visit reads */
    const int32_t* tile_turns;   /* [tiles]: the turn its rows meet, -1: queries as they are */
    const uint8_t* forms;        /* [kv_heads] */
    uint16_t *tail_keys, *tail_values; /* float16 [kv_heads, tail_stride, head_dim] */
    const uint64_t* tail_masks;        /* [tokens, tiles]: rows that a token sees */
    const float* qkv;                  /* [tokens, (heads + 2 kv_heads) * head_dim] */
    const int64_t* positions;          /* [tokens] */
    const float* inv_freq;             /* [rotary_pairs] */
    const float *q_norm, *k_norm;      /* [head_dim], or null */
    const float* sink_logits;          /* [heads], or null */
    float* queries;  /* scratch [1 + turns, heads * tokens, head_dim]: first as floats are met, then
                        every turn's */
    float* partials; /* scratch [heads * tokens, splits, head_dim + 2] */
    float* out;      /* [tokens, heads * head_dim] */
    /* Which pages are read: each token's best `share` of those it sees of a KV head, as in kvq_read
       of kvq.h. `chosen` is scratch [kv_heads, tokens, view_count], or NULL: all are read, and none
       of these is looked at. */
    uint8_t* chosen;
    float* bounds; /* scratch [heads * tokens, view_count] */
    float share;
    kvq_cuda_counts* counts; /* added to */
    /* Granules from slot `away_slot` on lie in the host's memory, from `away_end` down; of pages that
       are read they come to their slots here. NULL: all are here. */
    const uint8_t* away_end;
    int64_t away_slot;
} kvq_cuda_sequence;

/* Rows of a KV head that one block of threads attends for, of so many in a pass: for few of them no
   tile is worth its while. */
static inline int32_t kvq_cuda_rows_of_block(int32_t rows) {
    return rows > 16 ? 64 : 8;
}
/* Writes keys, turned, and values to the last `tokens` of the tail's rows. `sequence` is the
   host's, here and below. */
int kvq_cuda_store(const kvq_cuda_attention* attention, const kvq_cuda_sequence* sequence,
                   void* stream);
/* Likewise, and turns queries, chooses pages, attends, joins the splits. KVQ_BAD_ARGUMENT for a
   head_dim without a kernel. */
int kvq_cuda_attend(const kvq_cuda_attention* attention, const kvq_cuda_sequence* sequence,
                    void* stream);

/* A page that closes: where its planes and grids go, all of them at multiples of 4 bytes. Granules
   as in Entry of format.h, keys' then values'; those its widths have none of are not written. */
typedef struct {
    uint8_t* granules[8];
    uint8_t* constants;
    int32_t k_bits, v_bits;
} kvq_cuda_page;
/* Page p of every KV head, of one layer, from float16 rows: keys x[head, 0, rows[p, i]] and values
   x[head, 1, rows[p, i]] are its slot i. One grid for all pages, heads and sides. What constants
   have beyond the grids becomes 0. */
typedef struct {
    int32_t count, kv_heads, head_dim; /* pages of every KV head */
    const uint16_t* x;                 /* [kv_heads, 2, stride, head_dim] */
    int64_t stride;
    const int32_t* rows;        /* [count, 64] */
    const kvq_cuda_page* pages; /* [kv_heads, count] */
    const uint8_t* forms;       /* [kv_heads] */
    const float* feedback;      /* as of kvq_cache_feed_back, [kv_heads, head_dim, head_dim], or NULL */
    int64_t constant_bytes;
} kvq_cuda_closing;
int kvq_cuda_close(const kvq_cuda_closing* closing, void* stream);
/* A hi4 or lo4 plane in two granules becomes the 2-bit plane of its codes' top bits, in the first.
   No granule is of two planes. */
typedef struct {
    uint8_t* first;
    const uint8_t* second;
} kvq_cuda_plane;
/* `planes` [count] is the device's too. */
int kvq_cuda_narrow(const kvq_cuda_plane* planes, int32_t count, int32_t head_dim, void* stream);
/* Keys of a page whose planes of `from` bits lie in these granules become `to` bits wide, in the
   first of them, rounded by `feedback` [head_dim, head_dim] as when a page closes. */
typedef struct {
    uint8_t* granules[4];
    const uint8_t* grid;
    const float* feedback;
    int32_t from, to;
} kvq_cuda_keys;
/* `keys` [count] is the device's too. */
int kvq_cuda_narrow_keys(const kvq_cuda_keys* keys, int32_t count, int32_t head_dim, void* stream);

/* out = residual + bias + weights . input, as kvq_linear in kvq.h. For more than 16 tokens with its
   arithmetic, to the last bit where the input is x itself; for up to 16 the input is rounded to
   float16 against its largest number instead of to int8. Panels begin at multiples of 16 bytes.
   Scratch, for up to 16 tokens: `inputs` [tokens, columns], `tops` [tokens] and, where the grid has
   offsets, `steps` [blocks, tokens]; for more: `levels` [tokens, blocks * block] and `steps` [2,
   blocks, tokens], or of super-blocks [9, super-blocks, tokens]; with `exact_rows`, of up to 16
   tokens without bias and residual: `panel_tops` and `marks` [tokens, panels], `deviations`
   [tokens]. */
typedef struct {
    int32_t rows, columns, bits, block, grid;
    const uint8_t* panels;
    const float *x, *norm, *bias, *residual;
    float* out;
    int32_t tokens, activation, view;
    float norm_eps;
    uint16_t* inputs;
    float* tops;
    int8_t* levels;
    float* steps;
    int32_t exact_rows; /* 0: all; else the view KVQ_HI, exact in what may be the best */
    float *panel_tops, *deviations;
    uint8_t* marks;
} kvq_cuda_linear;
int kvq_cuda_linear_run(const kvq_cuda_linear* call, void* stream);

/* Of each row of logits [rows, columns] the `count` best, 1 to 256, best first and of equal ones
   the first: places and values [rows, count]. What is not a number counts as the best. */
int kvq_cuda_best(const float* logits, int32_t rows, int32_t columns, int32_t count,
                  int32_t* places, float* values, void* stream);

/* Rows move together: of every stream and side, `stride` and `source_stride` apart, float16 row
   first + i becomes row first + from[i] of `source`. Where that is `rows` itself, `from` rises. */
typedef struct {
    uint16_t* rows;
    const uint16_t* source;
    int64_t stride, source_stride; /* of float16 numbers */
    int32_t streams, head_dim, first, count;
    const int32_t* from; /* [count] */
} kvq_cuda_rows;
int kvq_cuda_gather(const kvq_cuda_rows* rows, void* stream);

#ifdef __cplusplus
}
#endif
