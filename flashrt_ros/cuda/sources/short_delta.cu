// The gated delta rule of a bucket of 32 tokens in one kernel: convolution, rule and gated norm.
//
// chunk_delta.cuh has the formulas. There is one block of tokens, so W and U need not be made:
//
//     R = diag(beta) (V - diag(exp(G)) K S),  N = T R
//
// K S, Q S and T do not wait for each other. A block has a value head and DVS columns of its state,
// and one warp more than it has work for: gates and T. All products are turned, columns of the
// state in front: see chunk_scan.cu. Blocks of a head are a cluster: they share the convolution of
// queries and keys, and sums of squares of the output.
//
// Every instruction runs once, or a few times, and comes from afar: short code is fast code here.

#define WIDTH (CHANNELS + HV * DV + 2 * HV)
#include "tensor.cuh"
#include "convolve.cuh"
#include "parts.cuh"

#define SLICES (DV / DVS)
#if ELEMENT == 16 && (SLICES == 1 || __CUDA_ARCH__ >= 900)
#include "cluster.cuh"
#define SUB 32
#define GROUP (HV / HK)
#define SIDES (DVS / 16)
#define WORKERS (32 * SIDES * SPLIT)
#define MINE (4 / SPLIT)       // tiles of 8 tokens of a warp
#define OWN (DK / 8 / SPLIT)   // tiles of 8 keys of a warp
#define PITCH_K (DK + 8)       // elements; these pitches keep neighbouring rows on other banks
#define PITCH_V (DVS + 8)
#define PITCH_T (SUB + 8)
#define PITCH_A (SUB + 4)      // floats
#define WARPS (WORKERS / 32)
#define JOBS (WARPS < 8 ? 8 / WARPS : 1)
#define RUN_V (SPLIT > 1 ? 4 : 8)  // tokens that a thread convolves, of values, and of others
#define SHARE (SUB / SLICES)       // tokens whose queries and keys this block convolves, for all
#define RUN (SHARE * DK / WORKERS > RUN_V ? SHARE * DK / WORKERS : RUN_V)
#define UNROLL (SPLIT > 1 ? 1 : DK / 32)  // registers have no index
#define STATE (SPLIT > 1 ? DK * 4 : 0)  // vectors of 16 columns; one warp has them in registers
#define LOWEST -60.0f          // of a log decay: beyond it nothing is left in fp32

// Two tiles of a product of 16 x 16 matrices, each given in two parts.
DEVICE void product(float (&y)[2][4], const u32 (&a)[2][4], const u32 (&b)[2][4]) {
#pragma unroll
    for (int n = 0; n < 2; ++n) {
#pragma unroll
        for (int e = 0; e < 4; ++e) y[n][e] = 0.0f;
        multiply(y[n], a[0], b[1][2 * n], b[1][2 * n + 1]);
        multiply(y[n], a[1], b[0][2 * n], b[0][2 * n + 1]);
        multiply(y[n], a[0], b[0][2 * n], b[0][2 * n + 1]);
    }
}

DEVICE void put_parts(uint4* high, uint4* low, int tile, int lane, const float (&x)[4]) {
    u32 a[2], b[2];
    split(a[0], b[0], x[0], x[1]);
    split(a[1], b[1], x[2], x[3]);
    put(high, tile, lane, a[0], a[1]);
    put(low, tile, lane, b[0], b[1]);
}

DEVICE void take(u32 (&a)[4], const uint4* from) {
    const uint4 x = *from;
    a[0] = x.x; a[1] = x.y; a[2] = x.z; a[3] = x.w;
}

// sharers: [HK], zero before and after; who is the last to have read a key head's window moves it.
extern "C" __global__ void CLUSTER __launch_bounds__(WORKERS + 32)
short_delta(const elem* mixed, const i64* count, elem* window,
            const float* __restrict__ taps, const float* neg_a, const float* dt_bias,
            float* state, u32* sharers, const float* __restrict__ norm, float eps,
            elem* __restrict__ out) {
    extern __shared__ float4 shared[];
    const int tid = threadIdx.x, lane = tid % 32, warp = tid / 32 % SPLIT;
    const int side = tid / (32 * SPLIT), rank = blockIdx.x;
    const int head = blockIdx.y, key_head = head / GROUP;
    const bool extra = tid >= WORKERS;
    uint4* high = (uint4*)shared + side * STATE;  // S [DK / 16][32]
    uint4* low = high + STATE / 2;
    uint4* late = (uint4*)shared + SIDES * STATE + side * SUB * 10;
    uint4* rest_high = late;                       // R [SUB / 16][32]
    uint4* rest_low = late + SUB * 2;
    uint4* fresh = late + SUB * 4;                 // N
    uint4* faded = late + SUB * 6;
    uint4* faded_low = late + SUB * 8;
    elem* qs = (elem*)((uint4*)shared + SIDES * (STATE + SUB * 10));
    elem* ks = qs + SUB * PITCH_K;
    elem* vs = ks + SUB * PITCH_K;
    elem* ps = vs + SUB * PITCH_V;
    float* system = (float*)(ps + SUB * PITCH_T);     // A [j][i]
    float* inverse = system + SUB * PITCH_A;          // T [i][j]; nobody looks above the diagonal
    float* squares = inverse + SUB * PITCH_A;         // [SUB][DV / 16]
    // Logarithms to the base 2: of decays summed up, of gates, of one over the length of q and k.
    float* totals = squares + DV / 16 * SUB;
    float* gates = totals + SUB;
    float* betas = gates + SUB;
    float* lengths = betas + SUB;                     // [2][SUB]
    u64* barriers = (u64*)(lengths + 2 * SUB);        // of queries and keys, of squares
    start_next();
    if (tid == WORKERS) {
        expect(barriers, 4 * SUB * DK);
        expect(barriers + 1, 4 * SUB * DV / 16);
    }
    begin();
    // What this kernel alone writes, what none writes, and the count: no need to wait.
    const int live = (int)*count;
    const int pair = tid % DK, part = pair % (DK / 2) * 2;
    const int first = rank * SHARE + tid / DK * RUN;  // where there is something left to do
    const int v_pair = tid % (DVS / 2) * 2, v_first = tid / (DVS / 2) * RUN_V;
    const int channel = (pair / (DK / 2) * HK + key_head) * DK + part;
    const int v_channel = 2 * HK * DK + head * DV + rank * DVS;
    const int column = rank * DVS + side * 16 + lane / 4;  // and + 8
    float* mine = state + (i64)head * DK * DV + column;
    if (extra) {
        const float bias = dt_bias[head], rate = neg_a[head];
        all_expect();
        wait_inputs();
        const elem* row = mixed + lane * WIDTH + CHANNELS + HV * DV + head;
        const bool here = lane < live;
        const float b = to_float(row[0]), g = to_float(row[HV]);
        const float beta = here ? sigmoid(b) : 0.0f;
        float total = here ? fmaxf(softplus(g + bias) * rate, LOWEST) * 1.44269504f : 0.0f;
#pragma unroll
        for (int offset = 1; offset < 32; offset *= 2) {
            const float other = __shfl_up_sync(0xffffffffu, total, offset);
            if (lane >= offset) total += other;
        }
        totals[lane] = total;
        betas[lane] = beta;
        gates[lane] = fast_log2(beta);
        // The next window, two channels at a time.
        constexpr int TURNS = (DK + DVS / 2 + 31) / 32;
        u32 next[TURNS][TAPS - 1];
        auto moved = [&](int n) {
            const int pair = n * 32 + lane, part = pair % (DK / 2) * 2;
            return pair < DK ? (pair / (DK / 2) * HK + key_head) * DK + part
                             : v_channel + (pair - DK) * 2;
        };
#pragma unroll
        for (int n = 0; n < TURNS; ++n)
#pragma unroll
            for (int i = 0; i < TAPS - 1; ++i) {
                const int t = live - (TAPS - 1) + i;
                if (n * 32 + lane < DK + DVS / 2)
                    next[n][i] = *(const u32*)((t < 0 ? window + (t + TAPS - 1) * CHANNELS
                                                      : mixed + t * WIDTH) + moved(n));
            }
        u32 readers = GROUP - 1;  // of this key head's window, before this block
        // Nobody waits for this warp yet: it inverts once in vain, so that its instructions are near.
#pragma unroll 1
        for (int pass = 0; pass < 2; ++pass) {
            if (pass) {
                __syncthreads();  // gates are there, and this window was read
                if (GROUP > 1 && rank == 0 && lane == 0) {
                    __threadfence();
                    readers = atomicAdd(sharers + key_head, 1u);
                }
                __syncthreads();  // lengths are there
                __syncthreads();  // A and P are there
            }
            // T11 and T22, a column a lane; then T21 = - T22 A21 T11
            const int corner = lane / 16 * 16;
            const float* a = system + corner * (PITCH_A + 1);
            float t[16];
#pragma unroll
            for (int i = 0; i < 16; ++i) t[i] = i == lane % 16 ? 1.0f : 0.0f;
#pragma unroll
            for (int j = 0; j < 15; ++j)
#pragma unroll
                for (int i = (j + 1) / 4 * 4; i < 16; i += 4) {
                    const float4 f = *(const float4*)(a + j * PITCH_A + i);
                    if (i > j) t[i] = fmaf(-f.x, t[j], t[i]);
                    if (i + 1 > j) t[i + 1] = fmaf(-f.y, t[j], t[i + 1]);
                    if (i + 2 > j) t[i + 2] = fmaf(-f.z, t[j], t[i + 2]);
                    t[i + 3] = fmaf(-f.w, t[j], t[i + 3]);
                }
#pragma unroll
            for (int i = 0; i < 16; ++i) inverse[(corner + i) * PITCH_A + lane] = t[i];
            __syncwarp();
            u32 of[2][4], b[2][4];
            const float* at = inverse + (16 + lane / 4) * PITCH_A + 16 + lane % 4 * 2;
            const float* below = inverse + lane % 4 * 2 * PITCH_A + lane / 4;
#pragma unroll
            for (int n = 0; n < 4; ++n) {
                const float2 f = *(const float2*)(at + n % 2 * 8 * PITCH_A + n / 2 * 8);
                split(of[0][n], of[1][n], -f.x, -f.y);
                const float2 g = *(const float2*)(system + (n / 2 * 8 + lane / 4) * PITCH_A + 16
                                                  + n % 2 * 8 + lane % 4 * 2);
                split(b[0][n], b[1][n], g.x, g.y);
            }
            float y[2][4];
            product(y, of, b);
#pragma unroll
            for (int n = 0; n < 4; ++n) {
                split(of[0][n], of[1][n], y[n / 2][n % 2 * 2], y[n / 2][n % 2 * 2 + 1]);
                const float* f = below + n % 2 * 8 * PITCH_A + n / 2 * 8;
                split(b[0][n], b[1][n], f[0], f[PITCH_A]);
            }
            product(y, of, b);
#pragma unroll
            for (int n = 0; n < 4; ++n)
                *(float2*)(inverse + (16 + n % 2 * 8 + lane / 4) * PITCH_A + n / 2 * 8 + lane % 4 * 2) =
                    make_float2(y[n / 2][n % 2 * 2], y[n / 2][n % 2 * 2 + 1]);
        }
        __syncthreads();  // T and R are there
        __syncthreads();  // N is there
        const bool last = rank == 0 && __shfl_sync(0xffffffffu, readers, 0) == GROUP - 1;
        if (GROUP > 1 && rank == 0 && last && lane == 0) sharers[key_head] = 0;
#pragma unroll
        for (int n = 0; n < TURNS; ++n)
#pragma unroll
            for (int i = 0; i < TAPS - 1; ++i)
                if (n * 32 + lane < DK ? last : n * 32 + lane < DK + DVS / 2)
                    *(u32*)(window + i * CHANNELS + moved(n)) = next[n][i];
        await(barriers + 1);
        return;
    }
    float s[OWN][4], o[MINE][4] = {};
#pragma unroll
    for (int d = 0; d < OWN; ++d)
#pragma unroll
        for (int e = 0; e < 4; ++e)
            s[d][e] = mine[((warp * OWN + d) * 8 + lane % 4 * 2 + e % 2) * DV + e / 2 * 8];
    Taps tap = load_taps(taps, channel);
    const Taps v_tap = load_taps(taps, v_channel + v_pair);
    const float gain[2] = {norm[column], norm[column + 8]};
    wait_inputs();
    u16 z[MINE][4];
    {
        u32 x[TAPS - 1 + RUN], y[TAPS - 1 + RUN_V];
        const bool busy = tid / DK * RUN < SHARE;
        if (busy) load_rows<RUN>(x, mixed, window, channel, first);
        if (v_first < SUB) load_rows<RUN_V>(y, mixed, window, v_channel + v_pair, v_first);
#pragma unroll
        for (int t = 0; t < MINE; ++t)
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                const int token = (warp * MINE + t) * 8 + lane % 4 * 2 + e % 2;
                z[t][e] = token < live
                    ? mixed[token * WIDTH + CHANNELS + head * DV + column + e / 2 * 8] : (u16)0;
            }
        all_expect();
        u32 ways[SLICES];
#pragma unroll
        for (int i = 0; i < SLICES; ++i) ways[i] = way_to(shared, i);
        int at = (pair / (DK / 2) * SUB + first) * PITCH_K + part, token = first, pitch = PITCH_K;
#pragma unroll 1
        for (int n = 0; n < (RUN + RUN_V) / 4; ++n) {
            u32 near[TAPS + 3];
            if (n == RUN / 4) {  // queries or keys are done, now values
                if (v_first >= SUB) break;
#pragma unroll
                for (int i = 0; i < TAPS - 1 + RUN_V; ++i) x[i] = y[i];
                tap = v_tap;
                token = v_first;
                pitch = PITCH_V;
                at = 2 * SUB * PITCH_K + v_first * PITCH_V + v_pair;  // vs
            }
#pragma unroll
            for (int i = 0; i < TAPS + 3; ++i) near[i] = x[i];
            smooth<4>(near, tap, token, live, [&](int i, u32 of) {
                u32* to = (u32*)(qs + at + i * pitch);
                if (n >= RUN / 4) *to = of;
                else if (busy)
#pragma unroll
                    for (int i = 0; i < SLICES; ++i) send(to, barriers, ways[i], of);
            });
#pragma unroll
            for (int i = 0; i + 4 < TAPS - 1 + RUN; ++i) x[i] = x[i + 4];
            token += 4;
            at += 4 * pitch;
        }
        if (SPLIT > 1)  // the state may be here only now
#pragma unroll
            for (int d = 0; d < OWN; ++d) put_parts(high, low, warp * OWN + d, lane, s[d]);
    }
    if (SLICES > 1) await(barriers);
    __syncthreads();  // queries, keys, values and gates are there, and this window was read
    // Products of keys with keys and of queries with keys take 16 x 8 each: three blocks of 16 x 16
    // are not above the diagonal. Two jobs have queries with themselves, for their lengths.
    float c[JOBS][2][4] = {};
#pragma unroll
    for (int n = 0; n < JOBS; ++n) {
        const int job = tid / 32 + n * WARPS;
        if (job > 7) break;
        const bool lonely = job > 5;
        const int band = (lonely ? job - 6 : (job / 2 + 1) / 2) * 16;
        const int left = lonely ? band : job / 4 * 16 + job % 2 * 8;
        const elem* queries = qs + (band + lane % 16) * PITCH_K + lane / 16 * 8;
        const elem* keys = queries + (lonely ? 0 : SUB * PITCH_K);
        const elem* others = qs + (lonely ? 0 : SUB * PITCH_K) + (left + lane % 8) * PITCH_K
                           + lane / 8 * 8;
        float part[2][4] = {};
#pragma unroll 1
        for (int d = 0; d < DK; d += 32) {
            u32 a[4], b[4];
            matrices(b, others + d);
            matrices(a, queries + d);
            multiply(c[n][0], a, b[0], b[1]);
            matrices(a, queries + d + 16);
            multiply(part[0], a, b[2], b[3]);
            matrices(b, others + (lonely ? 8 * PITCH_K : 0) + d);
            matrices(a, keys + d);
            multiply(c[n][1], a, b[0], b[1]);
            matrices(a, keys + d + 16);
            multiply(part[1], a, b[2], b[3]);
        }
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            c[n][0][e] += part[0][e];
            c[n][1][e] += part[1][e];
        }
        // what is on the diagonal, of the lanes that have it
        const bool odd = lane / 4 % 2;
        const float up = lonely ? odd ? c[n][0][1] : c[n][0][0] : odd ? c[n][1][1] : c[n][1][0];
        const float down = odd ? c[n][1][3] : c[n][1][2], factor = lonely ? (float)DK : 1.0f;
        float* to = lengths + (lonely ? 0 : SUB) + band + lane / 4;
        if (lane % 4 == lane / 8 && left / 16 == band / 16) {
            if (lonely || job % 2 == 0) to[0] = -0.5f * fast_log2((up + 1e-6f) * factor);
            if (lonely || job % 2) to[8] = -0.5f * fast_log2((down + 1e-6f) * factor);
        }
    }
    __syncthreads();  // lengths are there
#pragma unroll
    for (int n = 0; n < JOBS; ++n) {
        const int job = tid / 32 + n * WARPS;
        if (job > 5) break;
        const int from = (job / 2 + 1) / 2 * 16, left = job / 4 * 16 + job % 2 * 8;
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            const int i = from + lane / 4 + e / 2 * 8, j = left + lane % 4 * 2 + e % 2;
            const float between = totals[i] - (totals[j] - lengths[SUB + j]);
            const float x = c[n][1][e] * fast_exp2(between + lengths[SUB + i] + gates[i]);
            const float y = c[n][0][e] * fast_exp2(between + lengths[i]);
            system[j * PITCH_A + i] = j < i ? x : 0.0f;
            c[n][0][e] = j <= i ? y : 0.0f;
        }
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            elem* to = ps + (from + half * 8 + lane / 4) * PITCH_T + left + lane % 4 * 2;
            *(u32*)to = pack_bf16(c[n][0][2 * half], c[n][0][2 * half + 1]);
            if (job < 2) *(u32*)(to + 16) = 0;
        }
    }
    __syncthreads();  // A and P are there
    {   // K S and Q S
        float v[2][MINE][4] = {};
#pragma unroll UNROLL
        for (int k = 0; k < DK / 32; ++k) {
            u32 key[MINE][4], query[MINE][4];
#pragma unroll
            for (int t = 0; t < MINE; ++t) {
                const int at = ((warp * MINE + t) * 8 + lane % 8) * PITCH_K + k * 32 + lane / 8 * 8;
                matrices(key[t], ks + at);
                matrices(query[t], qs + at);
            }
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                u32 a[2][4];
                if (SPLIT > 1) {
                    take(a[0], high + (2 * k + i) * 32 + lane);
                    take(a[1], low + (2 * k + i) * 32 + lane);
                } else {
#pragma unroll
                    for (int e = 0; e < 4; ++e) {
                        const float* x = s[(4 * k + 2 * i + e / 2) % OWN] + e % 2 * 2;
                        split(a[0][e], a[1][e], x[0], x[1]);
                    }
                }
#pragma unroll
                for (int t = 0; t < MINE; ++t) {
                    multiply(v[0][t], a[0], key[t][2 * i], key[t][2 * i + 1]);
                    multiply(v[1][t], a[1], key[t][2 * i], key[t][2 * i + 1]);
                    multiply(o[t], a[0], query[t][2 * i], query[t][2 * i + 1]);
                }
            }
        }
        const float whole = fast_exp2(totals[SUB - 1]);
#pragma unroll
        for (int t = 0; t < MINE; ++t) {
            float r[4];
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                const int token = (warp * MINE + t) * 8 + lane % 4 * 2 + e % 2;
                const float seen = fast_exp2(gates[token] + totals[token] + lengths[SUB + token]);
                const elem value = vs[token * PITCH_V + side * 16 + lane / 4 + e / 2 * 8];
                r[e] = betas[token] * to_float(value) - seen * (v[0][t][e] + v[1][t][e]);
                o[t][e] *= fast_exp2(lengths[token] + totals[token]);
            }
            put_parts(rest_high, rest_low, warp * MINE + t, lane, r);
        }
#pragma unroll
        for (int d = 0; d < OWN; ++d)
#pragma unroll
            for (int e = 0; e < 4; ++e) s[d][e] *= whole;
    }
    __syncthreads();  // T and R are there
#pragma unroll
    for (int t = 0; t < MINE; ++t) {
        const int tile = warp * MINE + t;
        const float* row = inverse + (tile * 8 + lane / 4) * PITCH_A + lane % 4 * 2;
        float n[2][4] = {};
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            u32 a[4], b[2][2];
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                float2 f = *(const float2*)(row + i * 16 + e * 8);
                if (i == 1 && tile < 2) f = make_float2(0.0f, 0.0f);
                split(b[0][e], b[1][e], f.x, f.y);
            }
            take(a, rest_high + i * 32 + lane);
            multiply(n[0], a, b[0][0], b[0][1]);
            multiply(n[1], a, b[1][0], b[1][1]);
            take(a, rest_low + i * 32 + lane);
            multiply(n[1], a, b[0][0], b[0][1]);
        }
        float end[4];
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            const int token = tile * 8 + lane % 4 * 2 + e % 2;
            n[0][e] += n[1][e];
            end[e] = n[0][e]
                   * fast_exp2(lengths[SUB + token] + (totals[SUB - 1] - totals[token]));
        }
        put(fresh, tile, lane, pack_bf16(n[0][0], n[0][1]), pack_bf16(n[0][2], n[0][3]));
        put_parts(faded, faded_low, tile, lane, end);
    }
    __syncthreads();  // N is there
#pragma unroll
    for (int t = 0; t < MINE; ++t) {
        u32 p[4], a[4];
        matrices(p, ps + ((warp * MINE + t) * 8 + lane % 8) * PITCH_T + lane / 8 * 8);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            take(a, fresh + i * 32 + lane);
            multiply(o[t], a, p[2 * i], p[2 * i + 1]);
        }
        float sum[2];
#pragma unroll
        for (int e = 0; e < 2; ++e) {
            sum[e] = fmaf(o[t][e], o[t][e], o[t][e + 2] * o[t][e + 2]);
#pragma unroll
            for (int offset = 4; offset < 32; offset *= 2)
                sum[e] += __shfl_xor_sync(0xffffffffu, sum[e], offset);
        }
        const int token = (warp * MINE + t) * 8 + lane % 4 * 2 + lane / 4 % 2;
        if (lane / 8 < SLICES)  // one number to one block a lane
            send(squares + token * (DV / 16) + rank * SIDES + side, barriers + 1,
                 way_to(shared, lane / 8),
                 lane / 4 % 2 ? sum[1] : sum[0]);
    }
    u32 a[2][2][4];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        take(a[i][0], faded + i * 32 + lane);
        take(a[i][1], faded_low + i * 32 + lane);
    }
#pragma unroll
    for (int d = 0; d < OWN; ++d) {
        u32 k[4];
        matrices_turned(k, ks + lane * PITCH_K + (warp * OWN + d) * 8);
#pragma unroll
        for (int i = 0; i < 2; ++i)
#pragma unroll
            for (int e = 0; e < 2; ++e) multiply(s[d], a[i][e], k[2 * i], k[2 * i + 1]);
    }
#pragma unroll
    for (int d = 0; d < OWN; ++d)
#pragma unroll
        for (int e = 0; e < 4; ++e)
            mine[((warp * OWN + d) * 8 + lane % 4 * 2 + e % 2) * DV + e / 2 * 8] = s[d][e];
    float gate[MINE][4];  // all of the output that needs no sum
#pragma unroll
    for (int t = 0; t < MINE; ++t)
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            const float x = to_float(z[t][e]);
            gate[t][e] = o[t][e] * gain[e / 2] * x
                       * fast_inverse(1.0f + fast_exp2(-1.44269504f * x));
        }
    await(barriers + 1);  // sums of squares are there
#pragma unroll
    for (int t = 0; t < MINE; ++t)
#pragma unroll
        for (int e = 0; e < 2; ++e) {
            const int token = (warp * MINE + t) * 8 + lane % 4 * 2 + e;
            float sum = 0.0f;
#pragma unroll
            for (int i = 0; i < DV / 16; ++i) sum += squares[token * (DV / 16) + i];
            const float scale = rsqrtf(sum / DV + eps);
            elem* to = out + ((i64)token * HV + head) * DV + column;
            to[0] = from_float(gate[t][e] * scale);
            to[8] = from_float(gate[t][e + 2] * scale);
        }
}
#endif
