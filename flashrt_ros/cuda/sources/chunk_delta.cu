// The gated delta rule of a grid chunk: everything that needs no state, for all blocks of tokens
// and all heads at once, the convolution included; chunk_delta.cuh has the formulas.

#include "tensor.cuh"
#include "chunk_delta.cuh"
#include "convolve.cuh"
#include "parts.cuh"

#if ELEMENT == 16
#define THREADS (8 * SUB)
#define BANDS (SUB / 16)
#define HALVES (SUB / 32)
#define GROUP (HV / HK)
#define PITCH_K (DK + 8)  // elements; these pitches keep neighbouring rows on different banks
#define PITCH_V (DV + 8)
#define PITCH_T (SUB + 8)
#define PITCH_A (SUB + 4)  // floats
#define LOWEST -60.0f      // of a log decay: beyond it nothing is left in fp32

DEVICE uint4 unit(const float (&c)[4][4], int half) {
    return make_uint4(pack_bf16(c[0][half], c[0][half + 1]), pack_bf16(c[1][half], c[1][half + 1]),
                      pack_bf16(c[2][half], c[2][half + 1]), pack_bf16(c[3][half], c[3][half + 1]));
}

DEVICE void put_parts(elem* to, elem* low, float x, float y) {
    u32 pair, rest;
    split(pair, rest, x, y);
    *(u32*)to = pair;
    *(u32*)low = rest;
}

// One block a block of tokens and value head; RESIDENT of them share a multiprocessor.
extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT)
delta_prepare(const elem* mixed, const i64* count, const elem* window,
              const float* __restrict__ taps, const float* neg_a, const float* dt_bias,
              uint4* __restrict__ q_units, uint4* __restrict__ k_units,
              uint4* __restrict__ w_units, uint4* __restrict__ p_units,
              float4* __restrict__ u_tiles, float4* __restrict__ factors) {
    extern __shared__ float4 shared[];
    // Logarithms to the base 2: of decays summed up, of gates, of one over the length of q and k.
    __shared__ float totals[SUB], gates[SUB], lengths[2][SUB], betas[SUB], seen[SUB];
    elem* qs = (elem*)shared;
    elem* ks = qs + SUB * (PITCH_K > PITCH_T ? PITCH_K : PITCH_T);
    elem* vs = ks + SUB * PITCH_K;
    float* inverse = (float*)(vs + SUB * PITCH_V);       // T [i][j]
    float* rest = inverse + SUB * PITCH_A;               // A [j][i]; later the two below
    elem* t_keys = (elem*)rest;                          // T diag(beta exp(G))
    elem* t_values = t_keys + SUB * PITCH_T;             // T diag(beta)
    elem* t_low = qs;                                    // what the rounding of that left out
    float* corner = (float*)(t_values + SUB * PITCH_T);  // [32][36]
    const int tid = threadIdx.x, lane = tid % 32, warp = tid / 32;
    const int head = blockIdx.y, key_head = head / GROUP, base = blockIdx.x * SUB;
    constexpr int RUN = DK / 8;  // tokens that a thread convolves, of queries or of keys
    const int run = tid / DK * RUN, pair = tid % DK, part = pair % (DK / 2) * 2;
    const bool is_key = pair >= DK / 2;
    const int channel = (is_key * HK + key_head) * DK + part;
    // Weights and the count: no kernel of the graph writes them.
    const Taps tap = load_taps(taps, channel);
    const float bias = dt_bias[head], rate = neg_a[head];
    const int live = (int)*count;
    start_next();
    wait_inputs();
    if (base >= live) return;
    const i64 place = (i64)blockIdx.x * HV + head, key_place = (i64)blockIdx.x * HK + key_head;

    // Products of keys with keys and of queries with keys take 16 x 32 a warp. Four warps would
    // have nothing below the diagonal; they see to the lengths of queries, the gates and, so that
    // they are free later, their share of the values.
    const int kind = warp % 2, band = warp / 2 % BANDS * 16, left = warp / 2 / BANDS * 32;
    const int spare = warp - 2 * BANDS;
    const bool busy = spare < 0 || spare > 3, solving = !busy && spare >= 4 - HALVES;
    const bool gating = spare == 3 - HALVES;
    float beta[HALVES], g[HALVES];
    if (gating)
#pragma unroll
        for (int i = 0; i < HALVES; ++i) {
            const elem* row =
                mixed + (base + lane * HALVES + i) * WIDTH + CHANNELS + HV * DV + head;
            beta[i] = to_float(row[0]);
            g[i] = to_float(row[HV]);
        }
    convolve<RUN>(mixed, window, tap, channel, base + run, live,
                  (is_key ? ks : qs) + run * PITCH_K + part, PITCH_K);
    auto values = [&] {
        constexpr int RUN = DV / 16;
        const int d = tid % (DV / 2) * 2, run = tid / (DV / 2) * RUN;
        const int channel = 2 * HK * DK + head * DV + d;
        convolve<RUN>(mixed, window, load_taps(taps, channel), channel, base + run, live,
                      vs + run * PITCH_V + d, PITCH_V);
    };
    __syncthreads();
    float c[4][4] = {};
    if (busy) {
        const elem* rows = (kind ? ks : qs) + (band + lane % 16) * PITCH_K + lane / 16 * 8;
        const elem* keys = ks + (left + lane % 8 + lane / 16 * 8) * PITCH_K + lane / 8 % 2 * 8;
#pragma unroll
        for (int d = 0; d < DK; d += 16) {
            u32 a[4], b[4];
            matrices(a, rows + d);
#pragma unroll
            for (int n = 0; n < 2; ++n) {
                matrices(b, keys + n * 16 * PITCH_K + d);
                multiply(c[2 * n], a, b[0], b[1]);
                multiply(c[2 * n + 1], a, b[2], b[3]);
            }
        }
    } else {
        if (spare < BANDS) {
            const elem* rows = qs + (spare * 16 + lane % 16) * PITCH_K + lane / 16 * 8;
#pragma unroll
            for (int d = 0; d < DK; d += 16) {
                u32 a[4];  // transposed it is the other operand too, in another order of registers
                matrices(a, rows + d);
                multiply(c[0], a, a[0], a[2]);
                multiply(c[1], a, a[1], a[3]);
            }
        }
        if (gating) {
            float sum = 0.0f;
#pragma unroll
            for (int i = 0; i < HALVES; ++i) {
                const bool here = base + lane * HALVES + i < live;
                beta[i] = here ? sigmoid(beta[i]) : 0.0f;
                sum += here ? fmaxf(softplus(g[i] + bias) * rate, LOWEST) * 1.44269504f : 0.0f;
                g[i] = sum;
            }
            float before = sum;
#pragma unroll
            for (int offset = 1; offset < 32; offset *= 2) {
                const float other = __shfl_up_sync(0xffffffffu, before, offset);
                if (lane >= offset) before += other;
            }
#pragma unroll
            for (int i = 0; i < HALVES; ++i) {
                totals[lane * HALVES + i] = before - sum + g[i];
                betas[lane * HALVES + i] = beta[i];
                gates[lane * HALVES + i] = __log2f(beta[i]);
            }
        }
        if (solving) values();
    }
    {   // lengths: a warp that has seen a row with itself
        const int of = busy ? 1 : 0, first = busy ? band : spare * 16;
        const bool far = busy && band - left == 16;
        if (busy ? kind && (far || band == left) : spare < BANDS)
#pragma unroll
            for (int half = 0; half < 2; ++half)
#pragma unroll
                for (int e = 0; e < 2; ++e) {
                    const float x = far ? c[2 + half][2 * half + e] : c[half][2 * half + e];
                    if (lane / 4 == lane % 4 * 2 + e)
                        lengths[of][first + half * 8 + lane / 4] =
                            -0.5f * __log2f((x + 1e-6f) * (of ? 1.0f : (float)DK));
                }
    }
    __syncthreads();
    if (busy) {
        float row[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int at = band + lane / 4 + 8 * i;
            row[i] = totals[at] + lengths[kind][at] + (kind ? gates[at] : 0.0f);
        }
#pragma unroll
        for (int n = 0; n < 4; ++n)
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                const int i = band + lane / 4 + e / 2 * 8, j = left + n * 8 + lane % 4 * 2 + e % 2;
                const float x = c[n][e] * fast_exp2(row[e / 2] - (totals[j] - lengths[1][j]));
                c[n][e] = j - i < 1 - kind ? x : 0.0f;
                if (kind) rest[j * PITCH_A + i] = c[n][e];
            }
        if (!kind)
#pragma unroll
            for (int half = 0; half < 2; ++half)
                p_units[(place * SEEN + seen_at(band / 8 + half, left / 32)) * 32 + lane] =
                    unit(c, 2 * half);
    }
    __syncthreads();
    auto hand_over = [&](int worker, int workers) {  // queries and keys, once for their heads
        if (head % GROUP) return;
        for (int item = worker; item < TILES * KEYS; item += workers) {
            u32 r[4];
            matrices(r, qs + (item / KEYS * 8 + lane % 8) * PITCH_K + item % KEYS * 32
                        + lane / 8 * 8);
            q_units[(key_place * TILES * KEYS + item) * 32 + lane] =
                make_uint4(r[0], r[1], r[2], r[3]);
        }
        for (int item = worker; item < DK / 8 * PASTS; item += workers) {
            u32 r[4];
            matrices_turned(r, ks + (item % PASTS * 32 + lane) * PITCH_K + item / PASTS * 8);
            k_units[(key_place * (DK / 8) * PASTS + item) * 32 + lane] =
                make_uint4(r[0], r[1], r[2], r[3]);
        }
    };
    if (solving) {  // invert the blocks of 32 on the diagonal, a column a lane
        const int block = spare - (4 - HALVES);
        const float* a = rest + block * 32 * (PITCH_A + 1);
        float x[32];
#pragma unroll
        for (int i = 0; i < 32; ++i) x[i] = i == lane ? 1.0f : 0.0f;
#pragma unroll
        for (int j = 0; j < 31; ++j)
#pragma unroll
            for (int i = (j + 1) / 4 * 4; i < 32; i += 4) {
                const float4 f = *(const float4*)(a + j * PITCH_A + i);
                if (i > j) x[i] = fmaf(-f.x, x[j], x[i]);
                if (i + 1 > j) x[i + 1] = fmaf(-f.y, x[j], x[i + 1]);
                if (i + 2 > j) x[i + 2] = fmaf(-f.z, x[j], x[i + 2]);
                x[i + 3] = fmaf(-f.w, x[j], x[i + 3]);
            }
#pragma unroll
        for (int i = 0; i < 32; ++i) inverse[(block * 32 + i) * PITCH_A + block * 32 + lane] = x[i];
    } else {  // meanwhile: the values, and factors of tokens
        values();
        if (tid < SUB) {
            const float end = totals[SUB - 1];
            seen[tid] = fast_exp2(gates[tid] + totals[tid] + lengths[1][tid]);
            float4* factor = factors + place * (SUB / 2 + 1);
            float* pair = (float*)(factor + tid / 2) + tid % 2;
            pair[0] = fast_exp2(lengths[0][tid] + totals[tid]);
            pair[2] = fast_exp2(lengths[1][tid] + (end - totals[tid]));
            if (tid == 0) factor[SUB / 2].x = fast_exp2(end);
        }
        if (HALVES == 1) hand_over(warp, THREADS / 32 - 1);
    }
    __syncthreads();
    constexpr int MERGING = HALVES == 1 ? 0 : 256;  // threads, 2 x 2 of the corner each
    const int row = tid / 16 * 2, column = tid % 16 * 2;
    if (HALVES > 1) {  // T21 = - T22 A21 T11
        if (tid < MERGING) {
            float sum[2][2] = {};
#pragma unroll 8
            for (int k = 0; k < 32; ++k) {
                const float2 a = *(const float2*)(rest + k * PITCH_A + 32 + row);
                const float2 t = *(const float2*)(inverse + k * PITCH_A + column);
                sum[0][0] = fmaf(a.x, t.x, sum[0][0]);
                sum[0][1] = fmaf(a.x, t.y, sum[0][1]);
                sum[1][0] = fmaf(a.y, t.x, sum[1][0]);
                sum[1][1] = fmaf(a.y, t.y, sum[1][1]);
            }
#pragma unroll
            for (int i = 0; i < 2; ++i)
                *(float2*)(corner + (row + i) * 36 + column) = make_float2(sum[i][0], sum[i][1]);
        } else {
            hand_over(warp - MERGING / 32, (THREADS - MERGING) / 32);
        }
        __syncthreads();
        if (tid < MERGING) {
            float sum[2][2] = {};
#pragma unroll 4
            for (int k = 0; k < 32; k += 4) {
                float2 t[4];
#pragma unroll
                for (int e = 0; e < 4; ++e) t[e] = *(const float2*)(corner + (k + e) * 36 + column);
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    const float4 a =
                        *(const float4*)(inverse + (32 + row + i) * PITCH_A + 32 + k);
                    const float f[4] = {a.x, a.y, a.z, a.w};
#pragma unroll
                    for (int e = 0; e < 4; ++e) {
                        sum[i][0] = fmaf(f[e], t[e].x, sum[i][0]);
                        sum[i][1] = fmaf(f[e], t[e].y, sum[i][1]);
                    }
                }
            }
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const int at = (32 + row + i) * PITCH_T + column;
                *(u32*)(t_keys + at) =
                    pack_bf16(-sum[i][0] * seen[column], -sum[i][1] * seen[column + 1]);
                put_parts(t_values + at, t_low + at, -sum[i][0] * betas[column],
                          -sum[i][1] * betas[column + 1]);
            }
        }
    }
    if (tid >= MERGING)
        for (int item = tid - MERGING; item < HALVES * 512; item += THREADS - MERGING) {
            const int i = item / 16, j = i / 32 * 32 + item % 16 * 2;
            const float2 t = *(const float2*)(inverse + i * PITCH_A + j);
            *(u32*)(t_keys + i * PITCH_T + j) = pack_bf16(t.x * seen[j], t.y * seen[j + 1]);
            put_parts(t_values + i * PITCH_T + j, t_low + i * PITCH_T + j, t.x * betas[j],
                      t.y * betas[j + 1]);
        }
    __syncthreads();
    // W by 16 tokens x SPAN keys, U turned by SPAN values x 16 tokens; bands are dealt out so that
    // each scheduler gets some of each length
    constexpr int SPAN_K = DK % 64 ? 32 : 64, SPAN_V = DV % 64 ? 32 : 64;
    constexpr int FIRST = BANDS * DK / SPAN_K, ALL = FIRST + BANDS * DV / SPAN_V;
    for (int item = warp; item < ALL; item += THREADS / 32) {
        const int band = (item + item / BANDS) % BANDS;
        if (item < FIRST) {
            const int first = item / BANDS * SPAN_K;
            const elem* t_rows = t_keys + (band * 16 + lane % 16) * PITCH_T + lane / 16 * 8;
            const elem* k_rows = ks + lane % 16 * PITCH_K + first + lane / 16 * 8;
            float w[SPAN_K / 32][4][4] = {};
#pragma unroll
            for (int t = 0; t < BANDS; ++t)
                if (t <= band) {
                    u32 a[4], b[4];
                    matrices(a, t_rows + t * 16);
#pragma unroll
                    for (int n = 0; n < SPAN_K / 16; ++n) {
                        matrices_turned(b, k_rows + t * 16 * PITCH_K + n * 16);
                        multiply(w[n / 2][n % 2 * 2], a, b[0], b[1]);
                        multiply(w[n / 2][n % 2 * 2 + 1], a, b[2], b[3]);
                    }
                }
            uint4* to = w_units + ((place * TILES + band * 2) * KEYS + first / 32) * 32 + lane;
#pragma unroll
            for (int k = 0; k < SPAN_K / 32; ++k)
#pragma unroll
                for (int half = 0; half < 2; ++half)
                    to[(half * KEYS + k) * 32] = unit(w[k], 2 * half);
        } else {
            const int first = (item - FIRST) / BANDS * SPAN_V;
            const int at = (band * 16 + lane % 8 + lane / 16 * 8) * PITCH_T + lane / 8 % 2 * 8;
            const elem* v_rows = vs + (lane % 8 + lane / 16 * 8) * PITCH_V + first
                               + lane / 8 % 2 * 8;
            float u[SPAN_V / 16][2][4] = {};
#pragma unroll
            for (int t = 0; t < BANDS; ++t)
                if (t <= band) {
                    u32 a[4], high[4], low[4];
                    matrices(high, t_values + at + t * 16);
                    matrices(low, t_low + at + t * 16);
#pragma unroll
                    for (int m = 0; m < SPAN_V / 16; ++m) {
                        matrices_turned(a, v_rows + t * 16 * PITCH_V + m * 16);
                        multiply(u[m][0], a, high[0], high[1]);
                        multiply(u[m][1], a, high[2], high[3]);
                        multiply(u[m][0], a, low[0], low[1]);
                        multiply(u[m][1], a, low[2], low[3]);
                    }
                }
            float4* to =
                u_tiles + ((place * (DV / 16) + first / 16) * TILES + band * 2) * 32 + lane;
#pragma unroll
            for (int m = 0; m < SPAN_V / 16; ++m)
#pragma unroll
                for (int n = 0; n < 2; ++n)
                    to[(m * TILES + n) * 32] =
                        make_float4(u[m][n][0], u[m][n][1], u[m][n][2], u[m][n][3]);
        }
    }
}
#endif
