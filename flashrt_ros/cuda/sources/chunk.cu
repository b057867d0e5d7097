// What stands between the matrix products of a grid chunk: row-wise steps and the delta rule.
//
// A bucket of SIZE tokens is always run whole; *count of them are live. What the dead ones hold is
// computed and never leaves: rows and windows are written for live tokens alone, and dead tokens
// have zero key and zero decay, which leave the state exactly as it is.

template <class Number> struct alignas(4 * sizeof(Number)) Four { Number of[4]; };

DEVICE float number(float x) { return x; }
DEVICE float number(u16 x) { return bf16_float(x); }

#ifdef HIDDEN
extern "C" __global__ void __launch_bounds__(256)
embed_rows(const int* ids, const i64* count, const i64* position, const elem* table, float* x,
           int* tokens) {
    start_next();
    wait_inputs();
    const int t = blockIdx.x;
    const bool live = t < *count;
    if (live && threadIdx.x == 0) tokens[*position + t] = ids[t];
    const elem* row = table + (i64)(live ? ids[t] : 0) * HIDDEN;
    for (int i = threadIdx.x; i < HIDDEN; i += 256) x[(i64)t * HIDDEN + i] = to_float(row[i]);
}

// x += delta where there is one; out = rms_norm(x) * norm. One block a token, which it keeps. PARTS:
// delta is fp32, that many parts [PARTS][SIZE][HIDDEN] to add in order.
#ifdef PARTS
typedef float Delta;
#else
#define PARTS 1
typedef elem Delta;
#endif

extern "C" __global__ void __launch_bounds__(256)
norm_rows(float* x, const Delta* delta, const float* __restrict__ norm, float eps,
          elem* __restrict__ out) {
    constexpr int EACH = (HIDDEN + 1023) / 1024;  // groups of four values of a thread
    __shared__ float sums[8];
    float* row = x + (i64)blockIdx.x * HIDDEN;
    float4 y[EACH], factor[EACH];
    float sum = 0.0f;
    start_next();
#pragma unroll
    for (int e = 0; e < EACH; ++e) {
        const int i = (e * 256 + threadIdx.x) * 4;
        factor[e] = out && i < HIDDEN ? *(const float4*)(norm + i) : make_float4(0, 0, 0, 0);
    }
    wait_inputs();
#pragma unroll
    for (int e = 0; e < EACH; ++e) {
        const int i = (e * 256 + threadIdx.x) * 4;
        y[e] = i < HIDDEN ? *(const float4*)(row + i) : make_float4(0, 0, 0, 0);
    }
    if (delta) {
        Four<Delta> d[PARTS][EACH];
#pragma unroll
        for (int p = 0; p < PARTS; ++p)
#pragma unroll
            for (int e = 0; e < EACH; ++e) {
                const int i = (e * 256 + threadIdx.x) * 4;
                const Delta* more = delta + ((i64)p * gridDim.x + blockIdx.x) * HIDDEN;
                d[p][e] = i < HIDDEN ? *(const Four<Delta>*)(more + i) : Four<Delta>{};
            }
#pragma unroll
        for (int e = 0; e < EACH; ++e) {
            const int i = (e * 256 + threadIdx.x) * 4;
#pragma unroll
            for (int p = 0; p < PARTS; ++p) {
                y[e].x += number(d[p][e].of[0]); y[e].y += number(d[p][e].of[1]);
                y[e].z += number(d[p][e].of[2]); y[e].w += number(d[p][e].of[3]);
            }
            if (i < HIDDEN) *(float4*)(row + i) = y[e];
        }
    }
    if (!out) return;
#pragma unroll
    for (int e = 0; e < EACH; ++e)
        sum += y[e].x * y[e].x + y[e].y * y[e].y + y[e].z * y[e].z + y[e].w * y[e].w;
    sum = warp_sum(sum);
    if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = sum;
    __syncthreads();
    sum = 0.0f;
#pragma unroll
    for (int w = 0; w < 8; ++w) sum += sums[w];
    const float scale = rsqrtf(sum / HIDDEN + eps);
    elem* to = out + (i64)blockIdx.x * HIDDEN;
#pragma unroll
    for (int e = 0; e < EACH; ++e) {
        const int i = (e * 256 + threadIdx.x) * 4;
        if (i >= HIDDEN) continue;
        const float4 f = factor[e];
        *(Four<elem>*)(to + i) = Four<elem>{{
            from_float(y[e].x * f.x * scale), from_float(y[e].y * f.y * scale),
            from_float(y[e].z * f.z * scale), from_float(y[e].w * f.w * scale)}};
    }
}

// out[t][i] = silu(mixed[t][i]) * mixed[t][MLP + i]
extern "C" __global__ void __launch_bounds__(256)
swiglu_rows(const elem* mixed, elem* out) {
    start_next();
    wait_inputs();
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
#define SEGMENT 16  // tokens of a thread of the convolution
#define BLOCK 32    // tokens that the delta rule stages at once
#define WIDTH (CHANNELS + HV * DV + 2 * HV)

// Causal convolution with SiLU of mixed [SIZE][WIDTH] -> out fp32 [SIZE][CHANNELS].
extern "C" __global__ void __launch_bounds__(256)
conv_rows(const elem* mixed, const i64* count, elem* window,
          const float* __restrict__ taps, float* __restrict__ out) {
    start_next();
    wait_inputs();
    const int c = blockIdx.x * 256 + threadIdx.x, first = blockIdx.y * SEGMENT;
    const int live = (int)*count;
    if (c >= CHANNELS || first >= live) return;
    float tap[TAPS], x[TAPS - 1 + SEGMENT], last[TAPS - 1];
#pragma unroll
    for (int i = 0; i < TAPS; ++i) tap[i] = taps[i * CHANNELS + c];
#pragma unroll
    for (int i = 0; i < TAPS - 1 + SEGMENT; ++i) {
        const int t = first - (TAPS - 1) + i;  // < 0: a line of the window
        x[i] = t < 0 ? to_float(window[(t + TAPS - 1) * CHANNELS + c])
             : t < live ? to_float(mixed[(i64)t * WIDTH + c]) : 0.0f;
    }
    if (!first)  // what the window will be; this thread alone reads and writes these
#pragma unroll
        for (int i = 0; i < TAPS - 1; ++i) {
            const int t = live - (TAPS - 1) + i;
            last[i] = to_float(t < 0 ? window[(t + TAPS - 1) * CHANNELS + c]
                                     : mixed[(i64)t * WIDTH + c]);
        }
#pragma unroll
    for (int i = 0; i < SEGMENT; ++i) {
        float y = 0.0f;
#pragma unroll
        for (int j = 0; j < TAPS; ++j) y = fmaf(x[i + j], tap[j], y);
        if (first + i < live) out[(i64)(first + i) * CHANNELS + c] = silu(y);
    }
    if (!first)
#pragma unroll
        for (int i = 0; i < TAPS - 1; ++i) window[i * CHANNELS + c] = from_float(last[i]);
}

// The gated delta rule, token after token, with the state in registers. A block has one value head
// and DVS of its columns: a warp has 8 columns, its 8 key groups of lanes split the keys, and two
// values of each product meet over three shuffles. Tokens are staged BLOCK at a time, the next
// ones while these run. conv: fp32 [SIZE][CHANNELS]; out: fp32 [SIZE][HV DV].
#define WARPS (DVS / 8)
#define THREADS (32 * WARPS)
#define LINES ((DK + 31) / 32)        // vectors of four keys of a lane
#define TURNS (BLOCK / WARPS)         // tokens that a warp stages

extern "C" __global__ void __launch_bounds__(THREADS)
delta_rows(const float* conv, const elem* mixed, const i64* count,
           const float* neg_a, const float* dt_bias, float* state, float* __restrict__ out) {
    __shared__ float4 qs[BLOCK][DK / 4], ks[BLOCK][DK / 4];
    __shared__ float vs[BLOCK][DVS];
    __shared__ float decays[BLOCK], betas[BLOCK], both[BLOCK];
    const int head = blockIdx.y, tid = threadIdx.x;
    const int lane = tid % 32, warp = tid / 32, part = lane % 8;
    start_next();
    const int column = warp * 8 + lane / 8 * 2;  // and the next one, of this block
    const int key_head = head / (HV / HK);
    const float bias = dt_bias[head], rate = neg_a[head], scale = rsqrtf((float)DK);
    float* mine = state + (i64)head * DK * DV + blockIdx.x * DVS + column;
    float2 s[LINES][4];  // this kernel alone writes this state within a graph: no need to wait
#pragma unroll
    for (int l = 0; l < LINES; ++l)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int k = (l * 8 + part) * 4 + i;
            s[l][i] = k < DK ? *(const float2*)(mine + (i64)k * DV) : make_float2(0, 0);
        }
    wait_inputs();
    const int live = (int)*count;
    if (!live) return;
    float q[TURNS][LINES], k[TURNS][LINES], v[TURNS], a[TURNS], b[TURNS];  // the next tokens
    constexpr int EACH = LINES;  // values of a key row of a lane
    auto fetch = [&](int base) {
#pragma unroll
        for (int turn = 0; turn < TURNS; ++turn) {
            const int t = base + turn * WARPS + warp;
            const float* row = conv + (i64)t * CHANNELS;
            const bool here = t < live;
#pragma unroll
            for (int i = 0; i < EACH; ++i) {
                const int d = lane + 32 * i;
                q[turn][i] = here && d < DK ? row[key_head * DK + d] : 0.0f;
                k[turn][i] = here && d < DK ? row[HK * DK + key_head * DK + d] : 0.0f;
            }
            v[turn] = here && lane < DVS
                ? row[2 * HK * DK + head * DV + blockIdx.x * DVS + lane] : 0.0f;
            const elem* gates = mixed + (i64)t * WIDTH + CHANNELS + HV * DV;
            b[turn] = here ? to_float(gates[head]) : 0.0f;
            a[turn] = here ? to_float(gates[HV + head]) : 0.0f;
        }
    };
    fetch(0);
    for (int base = 0; base < live; base += BLOCK) {
        __syncthreads();  // the tokens before are done with
#pragma unroll
        for (int turn = 0; turn < TURNS; ++turn) {
            const int t = turn * WARPS + warp;
            float qq = 0.0f, kk = 0.0f, qk = 0.0f;
#pragma unroll
            for (int i = 0; i < EACH; ++i) {
                qq = fmaf(q[turn][i], q[turn][i], qq);
                kk = fmaf(k[turn][i], k[turn][i], kk);
                qk = fmaf(q[turn][i], k[turn][i], qk);
            }
            qq = rsqrtf(warp_sum(qq) + 1e-6f);
            kk = rsqrtf(warp_sum(kk) + 1e-6f);
            qk = warp_sum(qk);
#pragma unroll
            for (int i = 0; i < EACH; ++i) {
                const int d = lane + 32 * i;
                if (d < DK) {
                    ((float*)qs[t])[d] = q[turn][i] * qq;
                    ((float*)ks[t])[d] = k[turn][i] * kk;
                }
            }
            if (lane < DVS) vs[t][lane] = v[turn];
            if (lane == 0) {
                decays[t] = expf(softplus(a[turn] + bias) * rate);
                betas[t] = 1.0f / (1.0f + expf(-b[turn]));
                both[t] = qk * qq * kk;
            }
        }
        __syncthreads();
        if (base + BLOCK < live) fetch(base + BLOCK);
        const int stop = min(BLOCK, live - base);
        for (int t = 0; t < stop; ++t) {
            const float decay = decays[t], beta = betas[t];
            const float2 value = *(const float2*)(&vs[t][column]);
            float4 kv[LINES];
            float2 rk[2] = {}, rq[2] = {};
#pragma unroll
            for (int l = 0; l < LINES; ++l) {
                const bool here = (l * 8 + part) * 4 < DK;
                kv[l] = here ? ks[t][l * 8 + part] : make_float4(0, 0, 0, 0);
                const float4 qv = here ? qs[t][l * 8 + part] : make_float4(0, 0, 0, 0);
#define MIX(i, f)                                                                                              rk[i % 2].x = fmaf(s[l][i].x, kv[l].f, rk[i % 2].x);                                           rk[i % 2].y = fmaf(s[l][i].y, kv[l].f, rk[i % 2].y);                                           rq[i % 2].x = fmaf(s[l][i].x, qv.f, rq[i % 2].x);                                              rq[i % 2].y = fmaf(s[l][i].y, qv.f, rq[i % 2].y);
                MIX(0, x) MIX(1, y) MIX(2, z) MIX(3, w)
#undef MIX
            }
            float2 old_k = make_float2(rk[0].x + rk[1].x, rk[0].y + rk[1].y);
            float2 old_q = make_float2(rq[0].x + rq[1].x, rq[0].y + rq[1].y);
#pragma unroll
            for (int offset = 4; offset; offset >>= 1) {
                old_k.x += __shfl_xor_sync(0xffffffffu, old_k.x, offset);
                old_k.y += __shfl_xor_sync(0xffffffffu, old_k.y, offset);
                old_q.x += __shfl_xor_sync(0xffffffffu, old_q.x, offset);
                old_q.y += __shfl_xor_sync(0xffffffffu, old_q.y, offset);
            }
            const float2 d = make_float2((value.x - decay * old_k.x) * beta,
                                         (value.y - decay * old_k.y) * beta);
#pragma unroll
            for (int l = 0; l < LINES; ++l) {
#define MIX(i, f)                                                                                              s[l][i].x = fmaf(kv[l].f, d.x, s[l][i].x * decay);                                             s[l][i].y = fmaf(kv[l].f, d.y, s[l][i].y * decay);
                MIX(0, x) MIX(1, y) MIX(2, z) MIX(3, w)
#undef MIX
            }
            if (part == 0)
                *(float2*)(out + (i64)(base + t) * HV * DV + head * DV + blockIdx.x * DVS + column)
                    = make_float2((decay * old_q.x + both[t] * d.x) * scale,
                                  (decay * old_q.y + both[t] * d.y) * scale);
        }
    }
#pragma unroll
    for (int l = 0; l < LINES; ++l)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int k = (l * 8 + part) * 4 + i;
            if (k < DK) *(float2*)(mine + (i64)k * DV) = s[l][i];
        }
}

// Gated norm: out[t][h] = rms_norm(x[t][h]) * norm * silu(z). One warp a head, 8 heads a block.
extern "C" __global__ void __launch_bounds__(256)
gate_rows(const float* x, const elem* mixed, const i64* count,
          const float* __restrict__ norm, float eps, elem* __restrict__ out) {
    constexpr int EACH = (DV + 127) / 128;  // groups of four values of a lane
    start_next();
    wait_inputs();
    const int lane = threadIdx.x % 32, head = blockIdx.x * 8 + threadIdx.x / 32;
    const i64 t = blockIdx.y;
    if (head >= HV) return;
    const float* row = x + (t * HV + head) * DV;
    const elem* gate = mixed + t * WIDTH + CHANNELS + head * DV;
    elem* to = out + (t * HV + head) * DV;
    const bool live = t < *count;  // what was never computed: keep the product behind it finite
    float4 y[EACH];
    Four<elem> z[EACH];
    float sum = 0.0f;
#pragma unroll
    for (int e = 0; e < EACH; ++e) {
        const int d = e * 128 + lane * 4;
        const bool here = live && d < DV;
        y[e] = here ? *(const float4*)(row + d) : make_float4(0, 0, 0, 0);
        z[e] = here ? *(const Four<elem>*)(gate + d) : Four<elem>{};
        sum += y[e].x * y[e].x + y[e].y * y[e].y + y[e].z * y[e].z + y[e].w * y[e].w;
    }
    const float scale = rsqrtf(warp_sum(sum) / DV + eps);
#pragma unroll
    for (int e = 0; e < EACH; ++e) {
        const int d = e * 128 + lane * 4;
        if (d >= DV) continue;
        const float4 f = *(const float4*)(norm + d);
        const float v[4] = {y[e].x * f.x, y[e].y * f.y, y[e].z * f.z, y[e].w * f.w};
        Four<elem> r;
#pragma unroll
        for (int i = 0; i < 4; ++i) r.of[i] = from_float(v[i] * scale * silu(to_float(z[e].of[i])));
        *(Four<elem>*)(to + d) = r;
    }
}
#endif
