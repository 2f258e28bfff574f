/* What a batch must be for no kernel to leave its tensors; checked once a step, where it costs next to nothing. */

#pragma once

#include "call.h"

/* The numbers of cpu_backend/checks.py. */
enum { FITS = 0, BAD_STARTS, BAD_LENGTH, BAD_DECODE, BAD_SHARED, BAD_BLOCK };

/* Returns what is wrong, and with which sequence. */
static int check_batch(const Call *call, int64_t num_blocks, int64_t table_columns, int32_t *which) {
    if (call->query_starts[0] != 0 || call->query_starts[call->num_seqs] != call->num_tokens) return BAD_STARTS;
    for (int seq = 0; seq < call->num_seqs; seq++) {
        int64_t count = (int64_t)call->query_starts[seq + 1] - call->query_starts[seq], length = call->lengths[seq];
        const int32_t *table = table_of(call, seq);
        *which = seq;
        if (count < 0) return BAD_STARTS;
        if (length < 0 || length > table_columns * call->block_size || (count > length && length > 0))
            return BAD_LENGTH;
        if (seq < call->num_decodes && count != 1) return BAD_DECODE;
        if (count == 0 || length == 0) continue;
        if (seq < call->num_decodes && call->shared_prefix > length - count) return BAD_SHARED;
        int64_t first = call->window && length - count >= call->window ? length - count + 1 - call->window : 0;
        for (int64_t block = first / call->block_size; block * call->block_size < length; block++)
            if (table[block] < 0 || table[block] >= num_blocks) return BAD_BLOCK;
    }
    return FITS;
}
