/* What a batch must be for no kernel to leave its tensors. */

#pragma once

#include "call.h"

/* The numbers of cpu_backend/checks.py. */
enum { BAD_STARTS = 1, BAD_LENGTH, BAD_DECODE, BAD_SHARED, BAD_BLOCK };

/* An error and the sequence that has it, in one number. */
#define ERRORS 8
INLINE int64_t wrong(int error, int64_t seq) { return error + ERRORS * seq; }

/* Returns 0, or what is wrong. */
static int64_t check_batch(const Call *call) {
    if (call->query_starts[0] != 0 || call->query_starts[call->num_seqs] != call->num_tokens)
        return wrong(BAD_STARTS, 0);
    for (int seq = 0; seq < call->num_seqs; seq++) {
        int64_t count = (int64_t)call->query_starts[seq + 1] - call->query_starts[seq], length = call->lengths[seq];
        const int32_t *table = table_of(call, seq);
        if (count < 0) return wrong(BAD_STARTS, seq);
        if (length < 0 || length > call->table_columns * call->block_size || (count > length && length > 0))
            return wrong(BAD_LENGTH, seq);
        if (seq < call->num_decodes && count != 1) return wrong(BAD_DECODE, seq);
        if (count == 0 || length == 0) continue;
        if (seq < call->num_decodes && call->shared_prefix > length - count) return wrong(BAD_SHARED, seq);
        int64_t first = call->window && length - count >= call->window ? length - count + 1 - call->window : 0;
        for (int64_t block = first / call->block_size; block * call->block_size < length; block++)
            if (table[block] < 0 || table[block] >= call->num_blocks) return wrong(BAD_BLOCK, seq);
    }
    return PREPARED;
}
