// The gated delta rule of a grid chunk: the scan over blocks of tokens; chunk_delta.cuh has the
// formulas. One block a value head and DVS of its columns, four warps to 16 columns. All products
// are turned, columns of the state in front, so that what one leaves in registers is an operand of
// the next. A warp has its share of the tokens for N and O, and its share of the keys for S. The
// operands of the next blocks of tokens are on their way while one is worked on.

#include "tensor.cuh"
#include "chunk_delta.cuh"
#include "parts.cuh"

#if ELEMENT == 16
#define SIDES (DVS / 16)
#define WARPS (4 * SIDES)
#define MINE (TILES / 4)       // tiles of 8 tokens of a warp
#define OWN (DK / 8 / 4)       // tiles of 8 keys of a warp
#define W_AT 0                 // units of a stage
#define Q_AT (TILES * KEYS)
#define U_AT (2 * TILES * KEYS)
#define P_AT (U_AT + SIDES * TILES)
#define K_AT (P_AT + SEEN)
#define UNITS (K_AT + DK / 8 * PASTS)

// A tile in two parts, the second with what rounding the first left out.
DEVICE void put_parts(uint4* high, uint4* low, int tile, int lane, float x, float y, float z,
                      float w) {
    const u32 a = pack_bf16(x, y), b = pack_bf16(z, w);
    put(high, tile, lane, a, b);
    put(low, tile, lane, pack_bf16(x - bf16_float(a & 0xffff), y - bf16_float(a >> 16)),
        pack_bf16(z - bf16_float(b & 0xffff), w - bf16_float(b >> 16)));
}

// Copy COUNT units, every warp its share.
template <int COUNT> DEVICE void fetch(uint4* to, const void* from) {
#pragma unroll
    for (int i = 0; i < COUNT; i += WARPS)
        if (i + WARPS <= COUNT || i + threadIdx.x / 32 < COUNT)
            copy_async((elem*)(to + i * 32), (const elem*)((const uint4*)from + i * 32), true);
}

extern "C" __global__ void __launch_bounds__(32 * WARPS)
delta_scan(const uint4* q_units, const uint4* k_units, const uint4* w_units, const uint4* p_units,
           const float4* u_tiles, const float4* factors, const elem* mixed, const i64* count, elem* window, float* state,
           float* __restrict__ out) {
    extern __shared__ float4 shared[];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4, side = threadIdx.x / 128;
    const int head = blockIdx.y, key_head = head / (HV / HK);
    uint4* stages = (uint4*)shared;
    uint4* high = stages + STAGES * UNITS * 32 + side * DK * 2;              // [DK / 16][32]
    uint4* low = high + SIDES * DK * 2;
    uint4* fresh = stages + STAGES * UNITS * 32 + SIDES * DK * 4 + side * SUB * 2;
    uint4* faded = fresh + SIDES * SUB * 2;                                  // [SUB / 16][32]
    uint4* faded_low = faded + SIDES * SUB * 2;
    start_next();
    const int column = blockIdx.x * DVS + side * 16 + lane / 4;  // and + 8
    float* mine = state + (i64)head * DK * DV + column;
    float s[OWN][4];  // this kernel alone writes this state within a graph: no need to wait
#pragma unroll
    for (int d = 0; d < OWN; ++d)
#pragma unroll
        for (int e = 0; e < 4; ++e)
            s[d][e] = mine[((warp * OWN + d) * 8 + lane % 4 * 2 + e % 2) * DV + e / 2 * 8];
    const int live = (int)*count, steps = (live + SUB - 1) / SUB;  // no kernel writes the count
    wait_inputs();
    const int tid = threadIdx.x;
    const uint4* w_from = w_units + head * TILES * KEYS * 32 + tid;
    const uint4* q_from = q_units + key_head * TILES * KEYS * 32 + tid;
    const float4* u_from = u_tiles + (head * (DV / 16) + blockIdx.x * SIDES) * TILES * 32 + tid;
    const uint4* k_from = k_units + key_head * (DK / 8) * PASTS * 32 + tid;
    const uint4* p_from = p_units + head * SEEN * 32 + tid;
    auto fetch_first = [&](int n) {  // what N and O need
        if (n < steps) {
            uint4* stage = stages + n % STAGES * UNITS * 32 + tid;
            fetch<TILES * KEYS>(stage + W_AT * 32, w_from + n * (HV * TILES * KEYS * 32));
            fetch<TILES * KEYS>(stage + Q_AT * 32, q_from + n * (HK * TILES * KEYS * 32));
            fetch<SIDES * TILES>(stage + U_AT * 32, u_from + n * (HV * DV * 2 * TILES));
        }
        commit();
    };
    auto fetch_second = [&](int n) {  // what S needs, and O behind it
        if (n < steps) {
            uint4* stage = stages + n % STAGES * UNITS * 32 + tid;
            fetch<DK / 8 * PASTS>(stage + K_AT * 32, k_from + n * (HK * DK * 4 * PASTS));
            fetch<SEEN>(stage + P_AT * 32, p_from + n * (HV * SEEN * 32));
        }
        commit();
    };
#pragma unroll
    for (int n = 0; n < STAGES; ++n) {
        fetch_first(n);
        if (n < STAGES - 1) fetch_second(n);
    }
#pragma unroll
    for (int d = 0; d < OWN; ++d)
        put_parts(high, low, warp * OWN + d, lane, s[d][0], s[d][1], s[d][2], s[d][3]);
    {   // the window of the convolution: who reads it has run
        const int workers = gridDim.x * gridDim.y * 32 * WARPS;
        for (int c = (head * gridDim.x + blockIdx.x) * 32 * WARPS + threadIdx.x; c < CHANNELS;
             c += workers) {
            elem last[TAPS - 1];
#pragma unroll
            for (int i = 0; i < TAPS - 1; ++i) {
                const int t = live - (TAPS - 1) + i;
                last[i] = t < 0 ? window[(t + TAPS - 1) * CHANNELS + c] : mixed[(i64)t * WIDTH + c];
            }
#pragma unroll
            for (int i = 0; i < TAPS - 1; ++i) window[i * CHANNELS + c] = last[i];
        }
    }
    float4 factor[MINE];
    float whole = 0.0f;
    auto fetch_factors = [&](int n) {
        const float4* from = factors + ((i64)n * HV + head) * (SUB / 2 + 1);
#pragma unroll
        for (int t = 0; t < MINE; ++t) factor[t] = from[(warp * MINE + t) * 4 + lane % 4];
        whole = from[SUB / 2].x;
    };
    if (steps) fetch_factors(0);
    for (int n = 0; n < steps; ++n) {
        const uint4* stage = stages + n % STAGES * UNITS * 32 + lane;
        float v[2][MINE][4] = {}, o[MINE][4] = {};  // O is rounded anyway: the first part of S does
        arrive<2 * STAGES - 2>();
        __syncthreads();  // S is whole, and operands are there
#pragma unroll
        for (int k = 0; k < KEYS; ++k) {
            uint4 w[MINE], q[MINE];
#pragma unroll
            for (int t = 0; t < MINE; ++t) {
                w[t] = stage[(W_AT + (warp * MINE + t) * KEYS + k) * 32];
                q[t] = stage[(Q_AT + (warp * MINE + t) * KEYS + k) * 32];
            }
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const uint4 x = high[(2 * k + i) * 32 + lane], y = low[(2 * k + i) * 32 + lane];
                const u32 a[2][4] = {{x.x, x.y, x.z, x.w}, {y.x, y.y, y.z, y.w}};
#pragma unroll
                for (int t = 0; t < MINE; ++t)
#pragma unroll
                    for (int e = 0; e < 2; ++e)
                        multiply(v[e][t], a[e], i ? w[t].z : w[t].x, i ? w[t].w : w[t].y);
#pragma unroll
                for (int t = 0; t < MINE; ++t)
                    multiply(o[t], a[0], i ? q[t].z : q[t].x, i ? q[t].w : q[t].y);
            }
        }
        fetch_second(n - 1 + STAGES);
#pragma unroll
        for (int t = 0; t < MINE; ++t) {
            const float4 u =
                *(const float4*)(stage + (U_AT + side * TILES + warp * MINE + t) * 32);
            const float4 f = factor[t];
#pragma unroll
            for (int e = 0; e < 4; ++e) v[0][t][e] += v[1][t][e];
            const float x[4] = {u.x - v[0][t][0], u.y - v[0][t][1], u.z - v[0][t][2],
                                u.w - v[0][t][3]};
            put(fresh, warp * MINE + t, lane, pack_bf16(x[0], x[1]), pack_bf16(x[2], x[3]));
            put_parts(faded, faded_low, warp * MINE + t, lane, x[0] * f.z, x[1] * f.w, x[2] * f.z,
                      x[3] * f.w);
#pragma unroll
            for (int e = 0; e < 4; ++e) o[t][e] *= e % 2 ? f.y : f.x;
        }
#pragma unroll
        for (int d = 0; d < OWN; ++d)
#pragma unroll
            for (int e = 0; e < 4; ++e) s[d][e] *= whole;
        if (n + 1 < steps) fetch_factors(n + 1);
        arrive<2 * STAGES - 2>();
        __syncthreads();  // N is whole, S was read, and the other operands are there
#pragma unroll
        for (int j = 0; j < PASTS; ++j) {
            u32 a[2][2][4];
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const uint4 x = faded[(2 * j + i) * 32 + lane];
                const uint4 y = faded_low[(2 * j + i) * 32 + lane];
                a[i][0][0] = x.x; a[i][0][1] = x.y; a[i][0][2] = x.z; a[i][0][3] = x.w;
                a[i][1][0] = y.x; a[i][1][1] = y.y; a[i][1][2] = y.z; a[i][1][3] = y.w;
            }
#pragma unroll
            for (int d = 0; d < OWN; ++d) {
                const uint4 k = stage[(K_AT + (warp * OWN + d) * PASTS + j) * 32];
#pragma unroll
                for (int e = 0; e < 2; ++e) {
                    multiply(s[d], a[0][e], k.x, k.y);
                    multiply(s[d], a[1][e], k.z, k.w);
                }
            }
        }
        fetch_first(n + STAGES);
#pragma unroll
        for (int d = 0; d < OWN; ++d)
            put_parts(high, low, warp * OWN + d, lane, s[d][0], s[d][1], s[d][2], s[d][3]);
#pragma unroll
        for (int j = 0; j < PASTS; ++j) {
            if (j * 32 >= (warp + 1) * MINE * 8) break;  // behind all tokens of this warp
            const uint4 x = fresh[2 * j * 32 + lane], y = fresh[(2 * j + 1) * 32 + lane];
            const u32 a[2][4] = {{x.x, x.y, x.z, x.w}, {y.x, y.y, y.z, y.w}};
#pragma unroll
            for (int t = 0; t < MINE; ++t) {
                const uint4 p = stage[(P_AT + seen_at(warp * MINE + t, j)) * 32];
                multiply(o[t], a[0], p.x, p.y);
                multiply(o[t], a[1], p.z, p.w);
            }
        }
#pragma unroll
        for (int t = 0; t < MINE; ++t)
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                const int token = n * SUB + (warp * MINE + t) * 8 + lane % 4 * 2 + e % 2;
                if (token < live)
                    out[(i64)token * HV * DV + head * DV + column + e / 2 * 8] = o[t][e];
            }
    }
    arrive<0>();
#pragma unroll
    for (int d = 0; d < OWN; ++d)
#pragma unroll
        for (int e = 0; e < 4; ++e)
            mine[((warp * OWN + d) * 8 + lane % 4 * 2 + e % 2) * DV + e / 2 * 8] = s[d][e];
}
#endif
