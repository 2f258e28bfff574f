/* Cuts a batch into pieces of about equal cost, which threads take as they come. */

#pragma once

#include "tile.h"

/* Beyond that many heads a group, a tile of rows is faster than rows one by one. */
#define DECODE_GROUP 16
/* Heads that a decode attends for at a time; what they keep stays in the second-level cache. */
#define MOST_DECODE_HEADS 48
/* A piece shorter than this is not worth a part of its own. */
#define LEAST_PIECE 256
#define PIECES_PER_THREAD 4
/* A shared prefix pays from so many keys and rows on. */
#define LEAST_SHARED_KEYS 64
#define LEAST_SHARED_ROWS 12

typedef struct {
    const Call *call;
    int64_t piece_cost; /* 0 cuts nothing */
    int32_t shared;     /* positions that all decodes share and that are read for all at once */
    int32_t shared_parts;
    int32_t span; /* KV heads that a decode attends for at a time */
    Work *works; /* NULL while only counting */
    int64_t num_works;
    int64_t cost;
    int32_t *part_counts; /* [tokens]; 0 where a token's result is whole */
} Plan;

INLINE int by_rows_pays(const Call *call, int tokens, int heads) {
    return tokens == 1 && heads <= DECODE_GROUP && call->head_dim % W == 0;
}

/* A group of heads that no tile can hold is cut into slices of about this many. */
INLINE int slice_heads(const Call *call) {
    int group = group_size(call), slices = (group + MOST_ROWS - 1) / MOST_ROWS;
    return (group + slices - 1) / slices;
}

/* Tokens of a tile: the same for all slices, so that all heads of a token have the same parts. */
INLINE int tile_tokens(const Call *call) { return MOST_ROWS / slice_heads(call); }

/* A key that is read costs about as much as multiplying it with eight rows. */
INLINE int64_t key_cost(int rows) { return 8 + rows; }

/* Keys a piece, so that it costs about `piece_cost`: a multiple of KEYS, and the same for all heads of a token. */
static int piece_length(const Plan *plan, int keys, int tokens, int kv_heads) {
    int rows = tokens * slice_heads(plan->call);
    int64_t most = plan->piece_cost ? plan->piece_cost / key_cost(rows) / kv_heads : keys;
    if (most < LEAST_PIECE) most = LEAST_PIECE;
    int pieces = (keys + most - 1) / most;
    if (pieces <= 1) return keys > 0 ? keys : 1;
    return ((keys + pieces - 1) / pieces + KEYS - 1) / KEYS * KEYS;
}

static void add_pieces(Plan *plan, Work work, int length, int first_part) {
    int end = work.end, part = first_part, whole = first_part == 0 && end - work.begin <= length;
    do {
        work.end = end - work.begin < length ? end : work.begin + length;
        work.part = whole ? WHOLE : part;
        if (plan->works) plan->works[plan->num_works] = work;
        plan->num_works++;
        plan->cost += key_cost(work.tokens * work.heads) * work.kv_heads * (work.end - work.begin);
        work.begin = work.end;
        part++;
    } while (work.begin < end);
    for (int t = 0; t < work.tokens; t++) plan->part_counts[work.token + t] = whole ? 0 : part;
}

/* The query tokens of one sequence, from `begin` positions on. */
static void add_sequence(Plan *plan, int seq, Work work, int begin, int first_part) {
    const Call *call = plan->call;
    int start = call->query_starts[seq], count = call->query_starts[seq + 1] - start, length = call->lengths[seq];
    int most = tile_tokens(call);
    work.seq = seq;
    /* The last tile reads the most keys, so it goes first. */
    for (int first = (count - 1) / most * most; first >= 0 && count > 0; first -= most) {
        work.token = start + first;
        work.tokens = count - first < most ? count - first : most;
        work.position = length - count + first;
        work.end = work.position + work.tokens;
        work.begin = begin;
        if (call->window && work.position >= call->window) work.begin = work.position + 1 - call->window;
        if (length == 0) work.begin = work.position = work.end = 0;
        int spans = by_rows_pays(call, work.tokens, slice_heads(call)) ? plan->span : 1;
        int piece = piece_length(plan, work.end - work.begin, work.tokens, spans);
        for (work.kv_head = 0; work.kv_head < call->kv_heads; work.kv_head += spans) {
            work.kv_heads = call->kv_heads - work.kv_head < spans ? call->kv_heads - work.kv_head : spans;
            add_pieces(plan, work, piece, first_part);
        }
    }
}

/* The positions that all decodes share. */
static void add_shared(Plan *plan, Work work) {
    const Call *call = plan->call;
    int most = tile_tokens(call), length = piece_length(plan, plan->shared, most, 1);
    plan->shared_parts = (plan->shared + length - 1) / length;
    work.seq = 0;
    while (work.seq + 1 < call->num_decodes && call->lengths[work.seq] == 0) work.seq++;
    work.position = ALL_VISIBLE;
    for (work.token = 0; work.token < call->num_decodes; work.token += most) {
        work.tokens = call->num_decodes - work.token < most ? call->num_decodes - work.token : most;
        work.begin = 0;
        work.end = plan->shared;
        int end = work.end;
        for (work.part = 0; work.begin < end; work.part++, work.begin = work.end) {
            work.end = end - work.begin < length ? end : work.begin + length;
            if (plan->works) plan->works[plan->num_works] = work;
            plan->num_works++;
            plan->cost += key_cost(work.tokens * work.heads) * (work.end - work.begin);
        }
    }
}

/* As many KV heads at a time as leave enough work for all threads: what lies together is read together. */
static int decode_span(const Call *call) {
    int group = group_size(call), span = MOST_DECODE_HEADS / group;
    if (span > call->kv_heads) span = call->kv_heads;
    int64_t pieces = 0, wanted = (int64_t)call->threads * PIECES_PER_THREAD;
    for (int seq = 0; seq < call->num_decodes && pieces < wanted; seq++) {
        int keys = call->lengths[seq];
        if (call->window && keys > call->window) keys = call->window;
        pieces += 1 + keys / LEAST_PIECE;
    }
    return span > 1 && (call->threads == 1 || pieces >= wanted) ? span : 1;
}

static void make_plan(Plan *plan) {
    const Call *call = plan->call;
    int group = group_size(call), slice = slice_heads(call);
    plan->num_works = plan->cost = 0;
    int pays = !call->window && call->shared_prefix >= LEAST_SHARED_KEYS &&
               (int64_t)call->num_decodes * group >= LEAST_SHARED_ROWS;
    plan->shared = pays ? call->shared_prefix : 0;
    plan->shared_parts = 0;
    plan->span = decode_span(call);
    for (int head = 0; head < group; head += slice) {
        Work work = {.kv_heads = 1, .head = head, .heads = group - head < slice ? group - head : slice};
        for (work.kv_head = 0; plan->shared && work.kv_head < call->kv_heads; work.kv_head++) add_shared(plan, work);
        /* Prefills come after decodes, and cost more: they go first. */
        for (int seq = call->num_seqs - 1; seq >= 0; seq--) {
            int decode = seq < call->num_decodes;
            add_sequence(plan, seq, work, decode ? plan->shared : 0, decode ? plan->shared_parts : 0);
        }
    }
}
