// One-token product y = W f(x) with what stands around it: a norm in front, an epilogue behind.
//
// A warp takes ROWS rows at a time and walks over tasks with the stride of the grid; its lanes
// split K in 16-byte vectors, UNROLL vectors a batch. The next batch is always in flight, and the
// first one is asked for before the inputs are there. Sums run in a fixed order.
//
// K, N, ROWS, UNROLL: sizes.  PROLOGUE: how x becomes the input.  EPILOGUE: what becomes of y.

#define PLAIN 0   // x as it is
#define NORMED 1  // rms_norm(x) * norm
#define GATED 2   // per head of HEAD values: rms_norm(x) * norm * silu(z)

#define STORE 0     // out[n] = y
#define RESIDUAL 1  // out[n] += y
#define CONV 2      // n < CHANNELS: out[n] = silu(convolution), the window moves on; else STORE
#define SWIGLU 3    // rows n and n + N: out[n] = silu(y_n) * y_(n + N)
#define LOGITS 4    // STORE, and the boundary moves on: position, counter

#define CHUNKS (K / VEC)
#define STEPS ((CHUNKS + 31) / 32)
#define BATCHES ((STEPS + UNROLL - 1) / UNROLL)
#define WARPS 8
#if EPILOGUE == SWIGLU
#define TASKS ((N * 2 + ROWS - 1) / ROWS)
#else
#define TASKS ((N + ROWS - 1) / ROWS)
#endif

DEVICE int row_of(int task, int r) {
#if EPILOGUE == SWIGLU  // rows of a task: gates first, then their ups
    const int half = ROWS / 2;
    return r < half ? task * half + r : N + task * half + r - half;
#else
    return task * ROWS + r;
#endif
}

DEVICE void fetch(uint4 (&into)[ROWS][UNROLL], const elem* weight, int task, int batch, int lane) {
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
        const int row = row_of(task, r);
#pragma unroll
        for (int u = 0; u < UNROLL; ++u) {
            const int chunk = (batch * UNROLL + u) * 32 + lane;
            const bool live = chunk < CHUNKS && (EPILOGUE == SWIGLU ? row < 2 * N : row < N);
            into[r][u] = live ? load_once(weight + (i64)row * K + chunk * VEC)
                              : make_uint4(0, 0, 0, 0);
        }
    }
}

// x lies in shared memory as [VEC / 4][CHUNKS][4], so that lanes read neighbouring 16 bytes.
DEVICE int place(int k) { return (k % VEC / 4) * CHUNKS * 4 + k / VEC * 4 + k % 4; }

extern "C" __global__ void __launch_bounds__(256, BLOCKS)
gemv(const elem* __restrict__ weight, const float* x, const float* norm, float eps,
     const float* z, float* out, elem* window, const float* taps, i64* position, i64* counter,
     const i64* shift) {
    extern __shared__ float4 shared[];
    float* xs = (float*)shared;
    __shared__ float sums[WARPS];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int stride = gridDim.x * WARPS;
    int task = blockIdx.x * WARPS + warp;
    uint4 now[ROWS][UNROLL], next[ROWS][UNROLL];
    start_next();
    if (task < TASKS) fetch(now, weight, task, 0, lane);
    wait_inputs();
#if EPILOGUE == LOGITS
    if (shift) x += (*shift - 1) * K;  // the last of the rows that were folded
#endif
#if PROLOGUE == NORMED
    float sum = 0.0f;
    for (int k = threadIdx.x; k < K; k += 256) sum = fmaf(x[k], x[k], sum);
    sum = warp_sum(sum);
    if (lane == 0) sums[warp] = sum;
    __syncthreads();
    sum = 0.0f;
    for (int w = 0; w < WARPS; ++w) sum += sums[w];
    const float scale = rsqrtf(sum / K + eps);
    for (int k = threadIdx.x; k < K; k += 256) xs[place(k)] = x[k] * norm[k] * scale;
#elif PROLOGUE == GATED
    for (int head = warp; head < K / HEAD; head += WARPS) {
        float sum = 0.0f;
        for (int d = lane; d < HEAD; d += 32) sum = fmaf(x[head * HEAD + d], x[head * HEAD + d], sum);
        const float scale = rsqrtf(warp_sum(sum) / HEAD + eps);
        for (int d = lane; d < HEAD; d += 32) {
            const int k = head * HEAD + d;
            xs[place(k)] = x[k] * norm[d] * scale * silu(z[k]);
        }
    }
#else
    for (int k = threadIdx.x; k < K; k += 256) xs[place(k)] = x[k];
#endif
    __syncthreads();
    for (; task < TASKS; task += stride) {
        float total[ROWS];
#pragma unroll
        for (int r = 0; r < ROWS; ++r) total[r] = 0.0f;
#pragma unroll(BATCHES <= 4 ? BATCHES : 2)
        for (int batch = 0; batch < BATCHES; ++batch) {
            if (batch + 1 < BATCHES) fetch(next, weight, task, batch + 1, lane);
            else if (task + stride < TASKS) fetch(next, weight, task + stride, 0, lane);
#pragma unroll
            for (int u = 0; u < UNROLL; ++u) {
                const int chunk = (batch * UNROLL + u) * 32 + lane;
                if (CHUNKS % (32 * UNROLL) == 0 || chunk < CHUNKS) {
                    float xv[VEC];
#pragma unroll
                    for (int half = 0; half < VEC / 4; ++half)
                        *(float4*)(xv + 4 * half) = shared[half * CHUNKS + chunk];
#pragma unroll
                    for (int r = 0; r < ROWS; ++r) {
                        float w[VEC];
                        widen(now[r][u], w);
#pragma unroll
                        for (int i = 0; i < VEC; ++i) total[r] = fmaf(w[i], xv[i], total[r]);
                    }
                }
            }
#pragma unroll
            for (int r = 0; r < ROWS; ++r)
#pragma unroll
                for (int u = 0; u < UNROLL; ++u) now[r][u] = next[r][u];
        }
#pragma unroll
        for (int r = 0; r < ROWS; ++r) total[r] = warp_sum(total[r]);
#if EPILOGUE == SWIGLU
#pragma unroll
        for (int r = 0; r < ROWS / 2; ++r) {
            const int row = task * (ROWS / 2) + r;
            if (lane == r && row < N) out[row] = silu(total[r]) * total[r + ROWS / 2];
        }
#else
#pragma unroll
        for (int r = 0; r < ROWS; ++r) {
            const int row = task * ROWS + r;
            if (lane != r || row >= N) continue;
            float y = total[r];
#if EPILOGUE == RESIDUAL
            out[row] += y;
#elif EPILOGUE == CONV
            if (row < CHANNELS) {  // window: TAPS - 1 lines, oldest first
                float mix = 0.0f;
#pragma unroll
                for (int tap = 0; tap < TAPS - 1; ++tap)
                    mix = fmaf(to_float(window[tap * CHANNELS + row]), taps[tap * CHANNELS + row],
                               mix);
#pragma unroll
                for (int tap = 0; tap + 2 < TAPS; ++tap)
                    window[tap * CHANNELS + row] = window[(tap + 1) * CHANNELS + row];
                window[(TAPS - 2) * CHANNELS + row] = from_float(y);
                y = to_float(from_float(y));  // what later tokens will see of this one
                y = silu(fmaf(y, taps[(TAPS - 1) * CHANNELS + row], mix));
            }
            out[row] = y;
#else
            out[row] = y;
#endif
        }
#endif
    }
#if EPILOGUE == LOGITS
    // No other kernel of this fold reads them any more, and no block of this one does.
    if (blockIdx.x == 0 && threadIdx.x == 0) {
        *position += shift ? *shift : 1;
        if (counter) *counter += 1;
    }
#endif
}
