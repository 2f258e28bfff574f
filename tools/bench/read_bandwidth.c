/* Reads `count` floats on `threads` threads as fast as the machine can; the ceiling for decode attention. */

typedef float vf __attribute__((vector_size(64)));

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
