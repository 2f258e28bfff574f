/* Memory reads and multiply-adds as fast as the machine can, on some threads: the limits of kernels. */

typedef float vf __attribute__((vector_size(64)));

/* `count` floats in order. */
float read_all(const float *data, long count, int threads) {
    float total = 0.0f;
#pragma omp parallel for num_threads(threads) reduction(+ : total) schedule(static)
    for (long block = 0; block < count / 4096; block++) {
        const vf *from = (const vf *)(data + block * 4096);
        vf a = {0}, b = {0}, c = {0}, d = {0};
        for (int i = 0; i < 4096 / 16; i += 4) {
            a += from[i];
            b += from[i + 1];
            c += from[i + 2];
            d += from[i + 3];
        }
        a += b + c + d;
        for (int i = 0; i < 16; i++) total += a[i];
    }
    return total;
}

/* `count` blocks of `bytes` each in the order of `blocks`, each asked for two blocks ahead. */
float read_blocks(const char *data, const long *blocks, long count, long bytes, int threads) {
    float total = 0.0f;
#pragma omp parallel for num_threads(threads) reduction(+ : total) schedule(dynamic, 64)
    for (long i = 0; i < count; i++) {
        const char *from = data + blocks[i] * bytes, *ahead = data + blocks[i + 2 < count ? i + 2 : i] * bytes;
        vf a = {0}, b = {0};
        for (long at = 0; at < bytes; at += 128) {
            __builtin_prefetch(ahead + at);
            __builtin_prefetch(ahead + at + 64);
            a += *(const vf *)(from + at);
            b += *(const vf *)(from + at + 64);
        }
        a += b;
        for (int lane = 0; lane < 16; lane++) total += a[lane];
    }
    return total;
}

#define CHAINS 12

/* `rounds` times CHAINS vectors of 16 multiply-adds on each thread, with no memory read. */
float multiply_add(long rounds, int threads) {
    float total = 0.0f;
#pragma omp parallel num_threads(threads) reduction(+ : total)
    {
        vf sums[CHAINS], factor, step;
        for (int lane = 0; lane < 16; lane++) factor[lane] = 0.5f, step[lane] = lane;
        for (int chain = 0; chain < CHAINS; chain++) sums[chain] = step * (float)chain;
        for (long round = 0; round < rounds; round++)
            for (int chain = 0; chain < CHAINS; chain++) sums[chain] = sums[chain] * factor + step;
        for (int chain = 0; chain < CHAINS; chain++) total += sums[chain][chain];
    }
    return total;
}
