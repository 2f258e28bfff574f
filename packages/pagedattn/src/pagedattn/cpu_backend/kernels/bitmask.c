/* Token masks: pagedattn/bitmask.py says what they are. */

#include "rows.h"

/* Laid out as BITMASK of cpu_backend/arguments.py. */
typedef struct {
    void *logits;           /* [rows, vocab], rows `stride` elements apart */
    const uint32_t *masks;  /* [count, ceil(vocab / 32)] */
    const int64_t *indices; /* [count]: the row of each mask; NULL where it is the mask's own number */
    int64_t stride, rows, vocab, count;
    int32_t type, threads;
} BitmaskCall;

/* Elements that a second thread is worth waking for. */
#define LEAST_ELEMENTS_PER_THREAD 65536

#define MASK_ROW(NAME, ELEMENT, LOWEST)                                          \
    static void NAME(ELEMENT *logits, const uint32_t *mask, int64_t vocab) {     \
        for (int64_t first = 0; first < vocab; first += 32) {                    \
            uint32_t word = mask[first / 32];                                    \
            ELEMENT *some = logits + first;                                      \
            int count = vocab - first < 32 ? vocab - first : 32;                 \
            if (word == 0 && count == 32)                                        \
                for (int i = 0; i < 32; i++) some[i] = LOWEST;                   \
            else if (word != 0xffffffffu)                                        \
                for (int i = 0; i < count; i++)                                  \
                    if (!(word >> i & 1)) some[i] = LOWEST;                      \
        }                                                                        \
    }

/* Elements as their bits: -inf is a number, and nothing is converted. */
MASK_ROW(mask_words, uint32_t, 0xff800000u)
MASK_ROW(mask_halves, uint16_t, 0xfc00u)
MASK_ROW(mask_bfloats, uint16_t, 0xff80u)

/* Returns 0, or one more than the number of the first mask whose row is outside; then nothing is changed. */
int64_t octavo_bitmask(const BitmaskCall *call) {
    int64_t words = (call->vocab + 31) / 32;
    for (int64_t i = 0; call->indices && i < call->count; i++)
        if (call->indices[i] < 0 || call->indices[i] >= call->rows) return i + 1;
    int64_t threads = threads_for_rows(call->count, call->vocab, LEAST_ELEMENTS_PER_THREAD, call->threads);
#pragma omp parallel for num_threads(threads) if (threads > 1)
    for (int64_t i = 0; i < call->count; i++) {
        int64_t row = call->indices ? call->indices[i] : i;
        void *logits = (void *)at(call->type, call->logits, row * call->stride);
        const uint32_t *mask = call->masks + i * words;
        if (call->type == FLOAT32)
            mask_words(logits, mask, call->vocab);
        else if (call->type == FLOAT16)
            mask_halves(logits, mask, call->vocab);
        else
            mask_bfloats(logits, mask, call->vocab);
    }
    return 0;
}
