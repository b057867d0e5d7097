// What stands between the matrix products of a grid chunk: row-wise steps and the delta rule.
//
// A bucket of SIZE tokens is always run whole; *count of them are live. What the dead ones hold is
// computed and never leaves: rows and windows are written for live tokens alone, and dead tokens
// have zero key and zero decay, which leave the state exactly as it is.

#ifdef HIDDEN
extern "C" __global__ void __launch_bounds__(256)
embed_rows(const int* ids, const i64* count, const i64* position, const elem* table, float* x,
           int* tokens) {
    const int t = blockIdx.x;
    const bool live = t < *count;
    if (live && threadIdx.x == 0) tokens[*position + t] = ids[t];
    const elem* row = table + (i64)(live ? ids[t] : 0) * HIDDEN;
    for (int i = threadIdx.x; i < HIDDEN; i += 256) x[(i64)t * HIDDEN + i] = to_float(row[i]);
}

// x += delta where there is one; out = rms_norm(x) * norm. One block a token.
extern "C" __global__ void __launch_bounds__(256)
norm_rows(float* x, const elem* delta, const float* norm, float eps, elem* out) {
    __shared__ float sums[8];
    float* row = x + (i64)blockIdx.x * HIDDEN;
    float sum = 0.0f;
    for (int i = threadIdx.x; i < HIDDEN; i += 256) {
        float y = row[i];
        if (delta) { y += to_float(delta[(i64)blockIdx.x * HIDDEN + i]); row[i] = y; }
        sum = fmaf(y, y, sum);
    }
    if (!out) return;
    sum = warp_sum(sum);
    if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = sum;
    __syncthreads();
    sum = 0.0f;
    for (int w = 0; w < 8; ++w) sum += sums[w];
    const float scale = rsqrtf(sum / HIDDEN + eps);
    for (int i = threadIdx.x; i < HIDDEN; i += 256)
        out[(i64)blockIdx.x * HIDDEN + i] = from_float(row[i] * norm[i] * scale);
}

// out[t][i] = silu(mixed[t][i]) * mixed[t][MLP + i]
extern "C" __global__ void __launch_bounds__(256)
swiglu_rows(const elem* mixed, elem* out) {
    const elem* row = mixed + (i64)blockIdx.y * 2 * MLP;
    const int i = (blockIdx.x * 256 + threadIdx.x) * VEC;
    if (i >= MLP) return;
    float gate[VEC], up[VEC];
    widen(*(const uint4*)(row + i), gate);
    widen(*(const uint4*)(row + MLP + i), up);
    elem y[VEC];
#pragma unroll
    for (int j = 0; j < VEC; ++j) y[j] = from_float(silu(gate[j]) * up[j]);
    *(uint4*)(out + (i64)blockIdx.y * MLP + i) = *(const uint4*)y;
}
#endif

#ifdef CHANNELS
#define SEGMENT 32  // tokens of a thread of the convolution
#define BLOCK 64    // tokens of a block of the delta rule
#define WIDTH (CHANNELS + HV * DV + 2 * HV)

// Causal convolution with SiLU of mixed [SIZE][WIDTH] -> out fp32 [SIZE][CHANNELS].
extern "C" __global__ void __launch_bounds__(256)
conv_rows(const elem* mixed, const i64* count, elem* window, const float* taps, float* out) {
    const int c = blockIdx.x * 256 + threadIdx.x, first = blockIdx.y * SEGMENT;
    const int live = (int)*count;
    if (c >= CHANNELS || (first >= live && first)) return;
    float old[TAPS - 1], tap[TAPS], history[TAPS - 1];
#pragma unroll
    for (int i = 0; i < TAPS; ++i) tap[i] = taps[i * CHANNELS + c];
#pragma unroll
    for (int i = 0; i < TAPS - 1; ++i) {
        old[i] = first ? 0.0f : to_float(window[i * CHANNELS + c]);
        history[i] = first ? to_float(mixed[(i64)(first - TAPS + 1 + i) * WIDTH + c]) : old[i];
    }
    const int stop = min(first + SEGMENT, live);
    for (int t = first; t < stop; ++t) {
        const float x = to_float(mixed[(i64)t * WIDTH + c]);
        float y = 0.0f;
#pragma unroll
        for (int i = 0; i < TAPS - 1; ++i) y = fmaf(history[i], tap[i], y);
        y = fmaf(x, tap[TAPS - 1], y);
#pragma unroll
        for (int i = 0; i + 2 < TAPS; ++i) history[i] = history[i + 1];
        history[TAPS - 2] = x;
        out[(i64)t * CHANNELS + c] = silu(y);
    }
    if (first || !live) return;
#pragma unroll
    for (int i = 0; i < TAPS - 1; ++i) {  // this thread alone reads and writes these
        const int t = live - TAPS + 1 + i;  // < 0: still a line of the old window
        float x = t >= 0 ? to_float(mixed[(i64)t * WIDTH + c]) : 0.0f;
#pragma unroll
        for (int j = 0; j < TAPS - 1; ++j) if (t + TAPS - 1 == j) x = old[j];
        window[i * CHANNELS + c] = from_float(x);
    }
}

// Everything of the delta rule that does not need the state, for one block and one value head:
// solves (I + A) [fresh | seen] = [beta v | beta e^G k], A_ij = beta_i e^(G_i - G_j) k_i.k_j.
// conv: fp32 [SIZE][CHANNELS]. Work by block and head: fresh [BLOCK][DV]; seen, reads, writes
// [BLOCK][DK]; attend [BLOCK][BLOCK]; whole [1].
extern "C" __global__ void __launch_bounds__(256)
delta_solve(const float* conv, const elem* mixed, const i64* count, const float* neg_a,
            const float* dt_bias, float* fresh, float* seen, float* reads, float* writes,
            float* attend, float* whole) {
    extern __shared__ float shared[];
    float* a = shared;                    // [BLOCK][BLOCK + 4], a column a line
    float* k = a + BLOCK * (BLOCK + 4);   // [BLOCK][DK + 1]
    float* q = k + BLOCK * (DK + 1);      // [BLOCK][DK + 1]
    __shared__ float g[BLOCK], beta[BLOCK];
    const int live = (int)*count, first = blockIdx.x * BLOCK, head = blockIdx.y;
    if (first >= live) return;
    const int tid = threadIdx.x, lane = tid % 32, warp = tid / 32;
    const int key_head = head / (HV / HK);
    for (int t = warp; t < BLOCK; t += 8) {
        const bool here = first + t < live;
        const float* row = conv + (i64)(first + t) * CHANNELS + key_head * DK;
        float qq = 0.0f, kk = 0.0f;
        for (int d = lane; d < DK; d += 32) {
            const float x = here ? row[d] : 0.0f, y = here ? row[HK * DK + d] : 0.0f;
            q[t * (DK + 1) + d] = x;
            k[t * (DK + 1) + d] = y;
            qq = fmaf(x, x, qq);
            kk = fmaf(y, y, kk);
        }
        qq = rsqrtf(warp_sum(qq) + 1e-6f) * rsqrtf((float)DK);
        kk = rsqrtf(warp_sum(kk) + 1e-6f);
        for (int d = lane; d < DK; d += 32) {
            q[t * (DK + 1) + d] *= qq;
            k[t * (DK + 1) + d] *= kk;
        }
    }
    if (tid < BLOCK) {
        const elem* row = mixed + (i64)(first + tid) * WIDTH + CHANNELS + HV * DV;
        const bool here = first + tid < live;
        beta[tid] = here ? 1.0f / (1.0f + expf(-to_float(row[head]))) : 0.0f;
        g[tid] = here ? softplus(to_float(row[HV + head]) + dt_bias[head]) * neg_a[head] : 0.0f;
    }
    __syncthreads();
    if (warp == 0) {  // cumulated decay
        float low = g[lane], high = g[32 + lane];
#pragma unroll
        for (int offset = 1; offset < 32; offset <<= 1) {
            const float x = __shfl_up_sync(0xffffffffu, low, offset);
            const float y = __shfl_up_sync(0xffffffffu, high, offset);
            if (lane >= offset) { low += x; high += y; }
        }
        g[lane] = low;
        g[32 + lane] = high + __shfl_sync(0xffffffffu, low, 31);
    }
    __syncthreads();
    const i64 place = (i64)blockIdx.x * HV + head;
    const int ty = tid / 16, tx = tid % 16;
    float kk[4][4] = {}, qk[4][4] = {};
    for (int d = 0; d < DK; ++d) {
        float kr[4], qr[4], kc[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            kr[i] = k[(ty + 16 * i) * (DK + 1) + d];
            qr[i] = q[(ty + 16 * i) * (DK + 1) + d];
            kc[i] = k[(tx + 16 * i) * (DK + 1) + d];
        }
#pragma unroll
        for (int i = 0; i < 4; ++i)
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                kk[i][j] = fmaf(kr[i], kc[j], kk[i][j]);
                qk[i][j] = fmaf(qr[i], kc[j], qk[i][j]);
            }
    }
#pragma unroll
    for (int i = 0; i < 4; ++i)
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            const int row = ty + 16 * i, col = tx + 16 * j;
            const float decay = row >= col ? expf(g[row] - g[col]) : 0.0f;
            a[col * (BLOCK + 4) + row] = row > col ? beta[row] * decay * kk[i][j] : 0.0f;
            attend[place * BLOCK * BLOCK + row * BLOCK + col] = decay * qk[i][j];
        }
    const float end = g[BLOCK - 1];
    for (int i = tid; i < BLOCK * DK; i += 256) {
        const int t = i / DK, d = i % DK;
        reads[place * BLOCK * DK + i] = q[t * (DK + 1) + d] * expf(g[t]);
        writes[place * BLOCK * DK + i] = k[t * (DK + 1) + d] * expf(end - g[t]);
    }
    if (tid == 0) whole[place] = expf(end);
    __syncthreads();
    for (int col = tid; col < DK + DV; col += 256) {  // forward substitution, a column a thread
        const bool value = col < DV;
        const int d = value ? col : col - DV, pitch = value ? DV : DK;
        float* out = value ? fresh + place * BLOCK * DV + d : seen + place * BLOCK * DK + d;
#pragma unroll 1
        for (int base = 0; base < BLOCK; base += 16) {
            float x[16];
#pragma unroll
            for (int i = 0; i < 16; ++i) {
                const int t = base + i;
                x[i] = 0.0f;
                if (!value) x[i] = k[t * (DK + 1) + d] * beta[t] * expf(g[t]);
                else if (first + t < live)
                    x[i] = conv[(i64)(first + t) * CHANNELS + 2 * HK * DK + head * DV + d] * beta[t];
            }
#pragma unroll 8
            for (int j = 0; j < base; ++j) {  // what this thread has solved and written
                const float solved = out[j * pitch];
                const float4* line = (const float4*)(a + j * (BLOCK + 4) + base);
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    const float4 f = line[i];
                    x[4 * i] = fmaf(-f.x, solved, x[4 * i]);
                    x[4 * i + 1] = fmaf(-f.y, solved, x[4 * i + 1]);
                    x[4 * i + 2] = fmaf(-f.z, solved, x[4 * i + 2]);
                    x[4 * i + 3] = fmaf(-f.w, solved, x[4 * i + 3]);
                }
            }
#pragma unroll
            for (int j = 0; j < 15; ++j)
#pragma unroll
                for (int i = j + 1; i < 16; ++i)
                    x[i] = fmaf(-a[(base + j) * (BLOCK + 4) + base + i], x[j], x[i]);
#pragma unroll
            for (int i = 0; i < 16; ++i) out[(base + i) * pitch] = x[i];
        }
    }
}

// The sequential part: DVS columns of one head's state run through the blocks.
// new = fresh - seen S;  out = reads S + attend new;  S = whole S + writes^T new
extern "C" __global__ void __launch_bounds__(256)
delta_scan(const i64* count, const float* fresh, const float* seen, const float* reads,
           const float* writes, const float* attend, const float* whole, float* state,
           float* out) {
    extern __shared__ float shared[];
    float* tile = shared;                   // [BLOCK][DK + 4]
    float* near = tile + BLOCK * (DK + 4);  // [BLOCK][BLOCK + 4]
    float* s = near + BLOCK * (BLOCK + 4);  // [DK][DVS]
    float* fold = s + DK * DVS;             // [BLOCK][DVS]
    const int live = (int)*count, head = blockIdx.y, column = blockIdx.x * DVS;
    if (!live) return;
    const int tid = threadIdx.x;
    // Threads of a product [BLOCK][DVS]: PAIRS neighbouring columns, ROWS rows apart.
    constexpr int COLS = DVS / 2, STRIDE = 256 / COLS, EACH = BLOCK / STRIDE;
    const int cx = tid % COLS * 2, ry = tid / COLS;
    float* mine = state + (i64)head * DK * DV + column;
    for (int i = tid; i < DK * DVS; i += 256) s[i] = mine[(i64)(i / DVS) * DV + i % DVS];
    const int blocks = (live + BLOCK - 1) / BLOCK;
    auto load = [&](const float* from) {
        for (int i = tid * 4; i < BLOCK * DK; i += 1024)
            *(float4*)(tile + i / DK * (DK + 4) + i % DK) = *(const float4*)(from + i);
    };
    for (int b = 0; b < blocks; ++b) {
        const i64 place = (i64)b * HV + head;
        float2 acc[EACH], read[EACH];
        __syncthreads();
        load(seen + place * BLOCK * DK);
        for (int i = tid * 4; i < BLOCK * BLOCK; i += 1024)
            *(float4*)(near + i / BLOCK * (BLOCK + 4) + i % BLOCK) =
                *(const float4*)(attend + place * BLOCK * BLOCK + i);
        __syncthreads();
#pragma unroll
        for (int e = 0; e < EACH; ++e) acc[e] = read[e] = make_float2(0.0f, 0.0f);
#define PRODUCT(into, left, stride, right, depth)                                            \
        for (int d = 0; d < depth; d += 4) {                                                 \
            float2 r[4];                                                                     \
            _Pragma("unroll") for (int i = 0; i < 4; ++i)                                    \
                r[i] = *(const float2*)(right + (d + i) * DVS + cx);                         \
            _Pragma("unroll") for (int e = 0; e < EACH; ++e) {                               \
                const float4 l = *(const float4*)(left + (ry + e * STRIDE) * (stride) + d);  \
                into[e].x = fmaf(l.x, r[0].x, into[e].x);                                    \
                into[e].y = fmaf(l.x, r[0].y, into[e].y);                                    \
                into[e].x = fmaf(l.y, r[1].x, into[e].x);                                    \
                into[e].y = fmaf(l.y, r[1].y, into[e].y);                                    \
                into[e].x = fmaf(l.z, r[2].x, into[e].x);                                    \
                into[e].y = fmaf(l.z, r[2].y, into[e].y);                                    \
                into[e].x = fmaf(l.w, r[3].x, into[e].x);                                    \
                into[e].y = fmaf(l.w, r[3].y, into[e].y);                                    \
            }                                                                                \
        }
        PRODUCT(acc, tile, DK + 4, s, DK)
#pragma unroll
        for (int e = 0; e < EACH; ++e) {
            const int t = ry + e * STRIDE;
            const float2 f = *(const float2*)(fresh + (place * BLOCK + t) * DV + column + cx);
            *(float2*)(fold + t * DVS + cx) = make_float2(f.x - acc[e].x, f.y - acc[e].y);
        }
        __syncthreads();
        load(reads + place * BLOCK * DK);
        __syncthreads();
        PRODUCT(read, tile, DK + 4, s, DK)
        PRODUCT(read, near, BLOCK + 4, fold, BLOCK)
#pragma unroll
        for (int e = 0; e < EACH; ++e) {
            const int t = ry + e * STRIDE;
            *(float2*)(out + ((i64)b * BLOCK + t) * HV * DV + head * DV + column + cx) = read[e];
        }
        __syncthreads();
        load(writes + place * BLOCK * DK);
        __syncthreads();
        const float keep = whole[place];
        for (int i = tid; i < DK * COLS; i += 256) {  // a line and two columns a thread
            const int line = i / COLS, c = i % COLS * 2;
            float2 y = *(float2*)(s + line * DVS + c);
            y.x *= keep;
            y.y *= keep;
#pragma unroll 8
            for (int t = 0; t < BLOCK; ++t) {
                const float w = tile[t * (DK + 4) + line];
                const float2 f = *(const float2*)(fold + t * DVS + c);
                y.x = fmaf(w, f.x, y.x);
                y.y = fmaf(w, f.y, y.y);
            }
            *(float2*)(s + line * DVS + c) = y;
        }
    }
    __syncthreads();
    for (int i = tid; i < DK * DVS; i += 256) mine[(i64)(i / DVS) * DV + i % DVS] = s[i];
}

// Gated norm: out[t][h] = rms_norm(x[t][h]) * norm * silu(z). One warp a head, 8 heads a block.
extern "C" __global__ void __launch_bounds__(256)
gate_rows(const float* x, const elem* mixed, const i64* count, const float* norm, float eps,
          elem* out) {
    const int lane = threadIdx.x % 32, head = blockIdx.x * 8 + threadIdx.x / 32;
    const i64 t = blockIdx.y;
    if (head >= HV) return;
    const float* row = x + (t * HV + head) * DV;
    elem* to = out + (t * HV + head) * DV;
    if (t >= *count) {  // never computed: keep the product behind it finite
        for (int d = lane; d < DV; d += 32) to[d] = from_float(0.0f);
        return;
    }
    const elem* z = mixed + t * WIDTH + CHANNELS + head * DV;
    float sum = 0.0f;
    for (int d = lane; d < DV; d += 32) sum = fmaf(row[d], row[d], sum);
    const float scale = rsqrtf(warp_sum(sum) / DV + eps);
    for (int d = lane; d < DV; d += 32)
        to[d] = from_float(row[d] * norm[d] * scale * silu(to_float(z[d])));
}
#endif
