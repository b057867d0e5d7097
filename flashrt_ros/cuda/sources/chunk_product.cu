// Product y = x W^T of a short bucket of tokens, as fast as W can be read; bfloat16 alone.
//
// A block has ROWS rows of W, all SIZE tokens and one of PARTS shares of K. It takes SPAN columns of
// both at a time through a ring in shared memory; the first weights are on their way before the
// inputs are there. A warp has half of the rows and a quarter of a span's columns, 32 at a time:
// lanes read 16 neighbouring bytes of a row, of W and of x alike, and tensor cores see columns in
// that order on both sides. Sums run in a fixed order: along K within a warp, then the warps;
// whoever takes PARTIAL outputs adds the parts.
//
// K, N, ROWS, SIZE, PARTS, STAGES (of the ring): sizes.

#include "tensor.cuh"

#define STORE 0    // out[t][n] = y
#define SWIGLU 1   // rows n and n + N: out[t][n] = silu(y_n) * y_(n + N)
#define PARTIAL 2  // out fp32 [PARTS][SIZE][N]

#if ELEMENT == 16
#define WARPS 8
#define QUARTERS 4  // of a span, each two warps'
#define SPAN 256
#define PITCH (SPAN + 32)  // elements; keeps neighbouring rows on different banks
#define TILES (ROWS / 16)  // of a warp
#define BANDS (SIZE / 16)
#define TURNS ((K + 31) / 32)
#define SHARE ((TURNS + PARTS - 1) / PARTS * 32)  // columns of a block
#define SPANS ((SHARE + SPAN - 1) / SPAN)
#define EARLY (SPANS <= STAGES ? SPANS : STAGES - 1)  // spans that are always on their way
#define HALF (ROWS / 2)
#define SUMS (ROWS + 8)  // floats of a token's sums, likewise on different banks

extern "C" __global__ void __launch_bounds__(32 * WARPS)
chunk_product(const elem* __restrict__ weight, const elem* x, void* out, const char* ahead,
              i64 ahead_bytes) {
    extern __shared__ float4 shared[];
    elem* ring = (elem*)shared;    // [STAGES][ROWS of W, then SIZE of x][PITCH]
    float* sums = (float*)shared;  // [QUARTERS][SIZE][SUMS], once all is multiplied
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int first = blockIdx.y * SHARE, end = first + SHARE < K ? first + SHARE : K;
    auto bring = [&](int span) {
        elem* to = ring + (span % STAGES * (ROWS + SIZE) + warp) * PITCH + lane * 8;
        const int at = first + span * SPAN + lane * 8;
#pragma unroll
        for (int r = 0; r < ROWS; r += WARPS) {
#if EPILOGUE == SWIGLU  // gates first, then their ups
            const int n = blockIdx.x * HALF + (r + warp) % HALF;
            const i64 row = r + warp < HALF ? n : N + n;
#else
            const int n = blockIdx.x * ROWS + r + warp;
            const i64 row = n;
#endif
            const bool live = at < end && n < N;
            copy_async(to + r * PITCH, weight + (live ? row * K + at : 0), live);
        }
    };
    auto bring_inputs = [&](int span) {
        elem* to = ring + (span % STAGES * (ROWS + SIZE) + ROWS + warp) * PITCH + lane * 8;
        const int at = first + span * SPAN + lane * 8;
#pragma unroll
        for (int t = 0; t < SIZE; t += WARPS)
            copy_async(to + t * PITCH, x + (at < end ? (t + warp) * K + at : 0), at < end);
    };
    start_next();
#pragma unroll
    for (int span = 0; span < EARLY; ++span) {
        bring(span);
        commit();
    }
    wait_inputs();
#pragma unroll
    for (int span = 0; span < EARLY; ++span) {
        bring_inputs(span);
        commit();
    }
    const int quarter = warp % QUARTERS, side = warp / QUARTERS * HALF;
    const int place = lane / 4 * PITCH + quarter * (SPAN / QUARTERS) + lane % 4 * 8;
    float y[BANDS][TILES][4] = {};
#pragma unroll 1
    for (int span = 0; span < SPANS; ++span) {
        arrive<EARLY - 1>();
        __syncthreads();  // this span is there, and all have multiplied the one before
        if (span + EARLY < SPANS) {
            bring(span + EARLY);
            bring_inputs(span + EARLY);
        }
        commit();
        const elem* here = ring + span % STAGES * (ROWS + SIZE) * PITCH + place;
#pragma unroll
        for (int turn = 0; turn < SPAN / QUARTERS; turn += 32) {
            u32 one[BANDS][4], two[BANDS][4];
#pragma unroll
            for (int b = 0; b < BANDS; ++b) {
                const elem* rows = here + turn + (ROWS + b * 16) * PITCH;
                const uint4 low = *(const uint4*)rows, high = *(const uint4*)(rows + 8 * PITCH);
                one[b][0] = low.x; one[b][1] = high.x; one[b][2] = low.y; one[b][3] = high.y;
                two[b][0] = low.z; two[b][1] = high.z; two[b][2] = low.w; two[b][3] = high.w;
            }
#pragma unroll
            for (int n = 0; n < TILES; ++n) {
                const uint4 w = *(const uint4*)(here + turn + (side + n * 8) * PITCH);
#pragma unroll
                for (int b = 0; b < BANDS; ++b) {
                    multiply(y[b][n], one[b], w.x, w.y);
                    multiply(y[b][n], two[b], w.z, w.w);
                }
            }
        }
    }
    if (lane == 0)
        ask_ahead(ahead, ahead_bytes, ((i64)blockIdx.y * gridDim.x + blockIdx.x) * WARPS + warp,
                  (i64)gridDim.x * gridDim.y * WARPS);
    __syncthreads();
#pragma unroll
    for (int b = 0; b < BANDS; ++b)
#pragma unroll
        for (int n = 0; n < TILES; ++n)
#pragma unroll
            for (int half = 0; half < 2; ++half)
                *(float2*)(sums + (quarter * SIZE + b * 16 + half * 8 + lane / 4) * SUMS + side
                           + n * 8 + lane % 4 * 2) =
                    make_float2(y[b][n][2 * half], y[b][n][2 * half + 1]);
    __syncthreads();
    auto total = [&](int t, int r) {
        float2 sum = make_float2(0.0f, 0.0f);
#pragma unroll
        for (int q = 0; q < QUARTERS; ++q) {
            const float2 part = *(const float2*)(sums + (q * SIZE + t) * SUMS + r);
            sum.x += part.x;
            sum.y += part.y;
        }
        return sum;
    };
    constexpr int ACROSS = EPILOGUE == SWIGLU ? HALF / 2 : ROWS / 2;  // pairs of outputs
    for (int item = threadIdx.x; item < SIZE * ACROSS; item += 32 * WARPS) {
        const int t = item / ACROSS, r = item % ACROSS * 2, n = blockIdx.x * ACROSS * 2 + r;
        if (n >= N) continue;  // N is even
        const float2 sum = total(t, r);
#if EPILOGUE == SWIGLU
        const float2 up = total(t, HALF + r);
        ((u32*)out)[((i64)t * N + n) / 2] = pack_bf16(silu(sum.x) * up.x, silu(sum.y) * up.y);
#elif EPILOGUE == STORE
        ((u32*)out)[((i64)t * N + n) / 2] = pack_bf16(sum.x, sum.y);
#else
        *(float2*)((float*)out + ((i64)blockIdx.y * SIZE + t) * N + n) = sum;
#endif
    }
}
#endif
