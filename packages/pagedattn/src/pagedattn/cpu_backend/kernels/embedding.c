/* Rows of an embedding table, scaled, plus rows of a table of positions. */

#include "rows.h"

/* Laid out as EMBEDDING of cpu_backend/arguments.py. */
typedef struct {
    const int64_t *ids, *positions; /* [tokens]; positions are NULL where there is no table of them */
    const void *table;              /* [rows, width], or in panels as `linear` has them */
    const void *position_table;     /* [position_rows, width] */
    void *out;                      /* [tokens, width] */
    int64_t tokens, width, first, rows, position_rows;
    int32_t panel, partial, type, table_type, position_type, threads;
    float scale;
} EmbeddingCall;

/* Elements that a second thread is worth waking for. */
#define LEAST_ELEMENTS_PER_THREAD 65536

/* W elements of a row from `i` on, or the `left` that remain: in panels, words of a row lie `panel` words apart. */
INLINE vf table_some(const EmbeddingCall *call, int type, int64_t row, int64_t i, int64_t left) {
    if (!call->panel) return load_upto(type, at(type, call->table, row * call->width), i, left);
    int64_t n = type == BFLOAT16 ? 2 : 1, words = (call->width + n - 1) / n, panel = call->panel;
    int64_t begin = (row / panel * words * panel + row % panel) * n;
    float line[W] = {0};
    for (int64_t k = 0; k < W && k < left; k++)
        line[k] = load_one(type, call->table, begin + (i + k) / n * panel * n + (i + k) % n);
    return load(line);
}

INLINE void embed_token(const EmbeddingCall *call, int type, int table_type, int64_t token) {
    int64_t row = call->ids[token] - call->first, width = call->width;
    void *out = (void *)at(type, call->out, token * width);
    if (row < 0 || row >= call->rows) {
        memset(out, 0, width * size_of(type));
        return;
    }
    for (int64_t i = 0; i < width; i += W) {
        vf x = table_some(call, table_type, row, i, width - i) * splat(call->scale);
        if (call->positions) {
            const void *position = at(call->position_type, call->position_table, call->positions[token] * width);
            /* The scaled embedding is rounded before anything is added to it, as in its own type. */
            store_upto(type, out, i, width - i, x);
            x = load_upto(type, out, i, width - i) + load_upto(call->position_type, position, i, width - i);
        }
        store_upto(type, out, i, width - i, x);
    }
}

#define EMBED(TYPE, TABLE_TYPE)                                                                          \
    case 4 * TYPE + TABLE_TYPE:                                                                          \
        for (int64_t token = begin; token < end; token++) embed_token(call, TYPE, TABLE_TYPE, token);    \
        break;

static void embed_range(const EmbeddingCall *call, int64_t begin, int64_t end) {
    switch (4 * call->type + call->table_type) {
        EMBED(FLOAT32, FLOAT32)
        EMBED(FLOAT32, FLOAT16)
        EMBED(FLOAT32, BFLOAT16)
        EMBED(FLOAT16, FLOAT32)
        EMBED(FLOAT16, FLOAT16)
        EMBED(FLOAT16, BFLOAT16)
        EMBED(BFLOAT16, FLOAT32)
        EMBED(BFLOAT16, FLOAT16)
        EMBED(BFLOAT16, BFLOAT16)
    }
}

/* Returns 0, or for the first token with an id or a position outside of its table 1 or 2, plus 2 a token. */
static int64_t check_rows(void *arguments, Scratch *scratch) {
    const EmbeddingCall *call = arguments;
    (void)scratch;
    for (int64_t token = 0; token < call->tokens; token++) {
        int64_t row = call->ids[token] - call->first;
        if (!call->partial && (row < 0 || row >= call->rows)) return 1 + 2 * token;
        if (call->positions && (call->positions[token] < 0 || call->positions[token] >= call->position_rows))
            return 2 + 2 * token;
    }
    return PREPARED;
}

static int64_t embedding_threads(const void *arguments) {
    const EmbeddingCall *call = arguments;
    return threads_for_rows(call->tokens, call->width, LEAST_ELEMENTS_PER_THREAD, call->threads);
}

static int64_t embedding_pieces(const void *arguments, int stage, int64_t threads) {
    const EmbeddingCall *call = arguments;
    (void)stage;
    return row_pieces(call->tokens, call->width, threads);
}

static void run_embedding(const void *arguments, int stage, int64_t piece, int64_t threads, int64_t thread) {
    const EmbeddingCall *call = arguments;
    int64_t rows = call->tokens, pieces = embedding_pieces(call, stage, threads);
    (void)thread;
    embed_range(call, first_of(rows, pieces, piece), first_of(rows, pieces, piece + 1));
}

const Kernel embedding_kernel = {
    sizeof(EmbeddingCall), check_rows, embedding_threads, embedding_pieces, run_embedding, 1};
