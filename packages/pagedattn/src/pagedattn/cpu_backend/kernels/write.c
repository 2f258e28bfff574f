/* Storing new tokens' keys and values in the cache. */

#include "rows.h"

/* Laid out as WriteArguments of cpu_backend/arguments.py. Strides count elements. */
typedef struct {
    const void *key, *value;
    void *cache;
    const int64_t *slots;
    const float *kv_scales; /* NULL stores as it is */
    int64_t key_stride, key_head_stride, value_stride, value_head_stride;
    int64_t num_slots;
    int32_t num_tokens, kv_heads, head_dim, block_size;
    int32_t type, cache_type, threads;
} WriteCall;

/* Elements that a second thread is worth waking for. */
#define LEAST_ELEMENTS_PER_THREAD 65536

/* One head's row [head_dim]: as it is, or divided by its scale and rounded to float8. */
INLINE void store_row(const WriteCall *call, void *to, const void *from, float scale) {
    int64_t dim = call->head_dim, d = 0;
    if (call->cache_type != FLOAT8) {
        memcpy(to, from, dim * size_of(call->type));
        return;
    }
    for (; d + W <= dim; d += W) store_as(FLOAT8, to, d, load_as(call->type, from, d) / splat(scale));
    for (; d < dim; d++) store_one(FLOAT8, to, d, load_one(call->type, from, d) / scale);
}

static void write_range(const void *arguments, int64_t begin, int64_t end) {
    const WriteCall *call = arguments;
    int64_t size = size_of(call->type), row_bytes = call->head_dim * size_of(call->cache_type);
    for (int64_t token = begin; token < end; token++) {
        int64_t slot = call->slots[token];
        if (slot < 0) continue;
        for (int head = 0; head < call->kv_heads; head++) {
            int64_t tile = slot / call->block_size * 2 * call->kv_heads + head, offset = slot % call->block_size;
            char *key = (char *)call->cache + (tile * call->block_size + offset) * row_bytes;
            char *value = key + (int64_t)call->kv_heads * call->block_size * row_bytes;
            const float *scales = call->kv_scales;
            store_row(call, key,
                      (const char *)call->key + (token * call->key_stride + head * call->key_head_stride) * size,
                      scales ? scales[head] : 1.0f);
            store_row(call, value,
                      (const char *)call->value + (token * call->value_stride + head * call->value_head_stride) * size,
                      scales ? scales[call->kv_heads + head] : 1.0f);
        }
    }
}

/* Returns 0, or 1 plus the first token whose slot the cache does not have. */
static int64_t check_slots(void *arguments, Scratch *scratch) {
    const WriteCall *call = arguments;
    (void)scratch;
    for (int64_t token = 0; token < call->num_tokens; token++)
        if (call->slots[token] >= call->num_slots) return 1 + token;
    return PREPARED;
}

INLINE int64_t elements_per_token(const WriteCall *call) { return (int64_t)call->kv_heads * call->head_dim; }

static int64_t write_threads(const void *arguments) {
    const WriteCall *call = arguments;
    return threads_for_rows(call->num_tokens, elements_per_token(call), LEAST_ELEMENTS_PER_THREAD, call->threads);
}

static int64_t write_pieces(const void *arguments, int stage, int64_t threads) {
    const WriteCall *call = arguments;
    (void)stage;
    return row_pieces(call->num_tokens, elements_per_token(call), threads);
}

static void run_write(const void *arguments, int stage, int64_t piece, int64_t threads, int64_t thread) {
    const WriteCall *call = arguments;
    int64_t rows = call->num_tokens, pieces = write_pieces(call, stage, threads);
    (void)thread;
    write_range(call, first_of(rows, pieces, piece), first_of(rows, pieces, piece + 1));
}

const Kernel write_kernel = {sizeof(WriteCall), check_slots, write_threads, write_pieces, run_write, 1};
