// Product y = W f(x) with what stands around it: a norm in front, an epilogue behind; for one token,
// or for TOKENS in a row while the weights are read once. What a token gets does not depend on how
// many there are: its sums run in one order, so that a block of tokens has the bits of as many steps.
//
// A warp takes ROWS rows at a time and walks over tasks with the stride of the grid; its lanes
// split K in 16-byte vectors, UNROLL vectors a batch. The next batch is always in flight, and the
// first one is asked for before the inputs are there. A warp that has asked for its last weights
// asks for its share of what the next product will read. Sums run in a fixed order.
//
// K, N, ROWS, UNROLL: sizes.  PROLOGUE: how x becomes the input.  EPILOGUE: what becomes of y.
// x: [TOKENS][K]; out: [TOKENS][pitch]. *count of a block's tokens are live; the others leave no
// trace in the state. A ladder, where there is one, takes the window after each token instead.

#ifndef TOKENS
#define TOKENS 1
#define THREADS 256
#endif

#define PLAIN 0   // x as it is
#define NORMED 1  // rms_norm(x) * norm
#define GATED 2   // per head of HEAD values: x / rms, from PARTS sums of squares a head in norm

#define STORE 0     // out[n] = y
#define RESIDUAL 1  // out[n] += y
#define CONV 2      // n < CHANNELS: out[n] = silu(convolution), the window moves on; else STORE
#define SWIGLU 3    // rows n and n + N: out[n] = silu(y_n) * y_(n + N)
#define LOGITS 4    // STORE, and the boundary moves on: position, counter

#define CHUNKS (K / VEC)
#define STEPS ((CHUNKS + 31) / 32)
#define BATCHES ((STEPS + UNROLL - 1) / UNROLL)
#define WARPS (THREADS / 32)
#define TEAMS (THREADS / 256)  // of 256 threads; each prepares a token
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

DEVICE void fetch(uint4 (&into)[ROWS][UNROLL], const elem* weight, u64 policy, int task, int batch,
                  int lane) {
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
        const int row = row_of(task, r);
#pragma unroll
        for (int u = 0; u < UNROLL; ++u) {
            const int chunk = (batch * UNROLL + u) * 32 + lane;
            const bool live = chunk < CHUNKS && (EPILOGUE == SWIGLU ? row < 2 * N : row < N);
            into[r][u] = live ? load_once(weight + (i64)row * K + chunk * VEC, policy)
                              : make_uint4(0, 0, 0, 0);
        }
    }
}

// x lies in shared memory as [VEC / 4][CHUNKS] vectors of four, so that lanes read neighbours.
DEVICE int place(int i) { return i % (VEC / 4) * CHUNKS + i / (VEC / 4); }

DEVICE float4 times(float4 a, float4 b) {
    return make_float4(a.x * b.x, a.y * b.y, a.z * b.z, a.w * b.w);
}

DEVICE float4 times(float4 a, float b) { return times(a, make_float4(b, b, b, b)); }

#define EACH ((K + 1023) / 1024)  // vectors of x that a thread prepares

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
gemv(const elem* __restrict__ weight, const float* x, const float* norm, float eps, float* out,
     i64 pitch, elem* window, elem* ladder, i64 ladder_pitch, const float* taps, i64* position,
     i64* counter, const i64* count, const char* ahead, i64 ahead_bytes) {
    extern __shared__ float4 shared[];
    __shared__ float sums[TOKENS][8];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int stride = gridDim.x * WARPS;
    int task = blockIdx.x * WARPS + warp;
    bool asked = false;
    auto look_ahead = [&]() {
        if (lane == 0 && !asked)
            ask_ahead(ahead, ahead_bytes, (i64)blockIdx.x * WARPS + warp, stride);
        asked = true;
    };
    uint4 now[ROWS][UNROLL], next[ROWS][UNROLL];
    const u64 policy = leave_first();
    start_next();
    if (task < TASKS) fetch(now, weight, policy, task, 0, lane);
    if (task >= TASKS || (BATCHES == 1 && task + stride >= TASKS)) look_ahead();
    const int member = threadIdx.x % 256, team = threadIdx.x / 256;
#if PROLOGUE == NORMED
    float4 factor[EACH];
#pragma unroll
    for (int e = 0; e < EACH; ++e) {
        const int i = e * 256 + member;
        factor[e] = i < K / 4 ? ((const float4*)norm)[i] : make_float4(0, 0, 0, 0);
    }
#endif
    wait_inputs();
    const int live = TOKENS > 1 && count ? (int)*count : 1;
#if EPILOGUE == LOGITS && TOKENS == 1
    if (count) x += (*count - 1) * K;  // the last of the rows that were folded
#endif
    float4 value[TOKENS / TEAMS][EACH];  // all are asked for before one is waited for
#pragma unroll
    for (int mine = 0; mine < TOKENS / TEAMS; ++mine)
#pragma unroll
        for (int e = 0; e < EACH; ++e) {
            const int i = e * 256 + member, t = mine * TEAMS + team;
            value[mine][e] = i < K / 4 ? ((const float4*)(x + t * K))[i]
                                       : make_float4(0, 0, 0, 0);
        }
#if PROLOGUE == NORMED
#pragma unroll
    for (int mine = 0; mine < TOKENS / TEAMS; ++mine) {
        float sum = 0.0f;
#pragma unroll
        for (int e = 0; e < EACH; ++e) {
            const float4 v = value[mine][e];
            sum = fmaf(v.x, v.x, sum);
            sum = fmaf(v.y, v.y, sum);
            sum = fmaf(v.z, v.z, sum);
            sum = fmaf(v.w, v.w, sum);
        }
        sum = warp_sum(sum);
        if (lane == 0) sums[mine * TEAMS + team][member / 32] = sum;
    }
    __syncthreads();
#endif
#pragma unroll
    for (int mine = 0; mine < TOKENS / TEAMS; ++mine) {
        const int t = mine * TEAMS + team;
#if PROLOGUE == NORMED
        float sum = 0.0f;
#pragma unroll
        for (int w = 0; w < 8; ++w) sum += sums[t][w];
        const float scale = rsqrtf(sum / K + eps);
#endif
#pragma unroll
        for (int e = 0; e < EACH; ++e) {
            const int i = e * 256 + member;
            if (i >= K / 4) continue;
            float4 v = value[mine][e];
#if PROLOGUE == NORMED
            v = times(times(v, factor[e]), scale);
#elif PROLOGUE == GATED
            const float* squares = norm + (t * K + i * 4) / HEAD * PARTS;
            float sum = 0.0f;
#pragma unroll
            for (int part = 0; part < PARTS; ++part) sum += squares[part];
            v = times(v, rsqrtf(sum / HEAD + eps));
#endif
            shared[t * (K / 4) + place(i)] = v;
        }
    }
    __syncthreads();
    for (; task < TASKS; task += stride) {
        float total[TOKENS][ROWS];
#pragma unroll
        for (int t = 0; t < TOKENS; ++t)
#pragma unroll
            for (int r = 0; r < ROWS; ++r) total[t][r] = 0.0f;
#if EPILOGUE == CONV || EPILOGUE == RESIDUAL  // lane r finishes row r: ask for what that takes now
        const int mine = task * ROWS + lane;
        const bool finishes = lane < ROWS && mine < N;
#endif
#if EPILOGUE == CONV
        float line[TAPS], tap[TAPS];
        const bool mixes = finishes && mine < CHANNELS;
#pragma unroll
        for (int i = 0; i < TAPS; ++i) {
            tap[i] = mixes ? taps[i * CHANNELS + mine] : 0.0f;
            line[i] = mixes && i + 1 < TAPS ? to_float(window[i * CHANNELS + mine]) : 0.0f;
        }
#elif EPILOGUE == RESIDUAL
        float before[TOKENS];
#pragma unroll
        for (int t = 0; t < TOKENS; ++t) before[t] = finishes ? out[t * pitch + mine] : 0.0f;
#endif
#pragma unroll(BATCHES <= 4 ? BATCHES : 2)
        for (int batch = 0; batch < BATCHES; ++batch) {
            if (batch + 1 < BATCHES) fetch(next, weight, policy, task, batch + 1, lane);
            else if (task + stride < TASKS) fetch(next, weight, policy, task + stride, 0, lane);
            else look_ahead();
#pragma unroll
            for (int u = 0; u < UNROLL; ++u) {
                const int chunk = (batch * UNROLL + u) * 32 + lane;
                if (CHUNKS % (32 * UNROLL) == 0 || chunk < CHUNKS) {
                    float w[ROWS][VEC];
#pragma unroll
                    for (int r = 0; r < ROWS; ++r) widen(now[r][u], w[r]);
#pragma unroll
                    for (int t = 0; t < TOKENS; ++t) {
                        float xv[VEC];
#pragma unroll
                        for (int half = 0; half < VEC / 4; ++half)
                            *(float4*)(xv + 4 * half) = shared[t * (K / 4) + half * CHUNKS + chunk];
#pragma unroll
                        for (int r = 0; r < ROWS; ++r)
#pragma unroll
                            for (int i = 0; i < VEC; ++i)
                                total[t][r] = fmaf(w[r][i], xv[i], total[t][r]);
                    }
                }
            }
#pragma unroll
            for (int r = 0; r < ROWS; ++r)
#pragma unroll
                for (int u = 0; u < UNROLL; ++u) now[r][u] = next[r][u];
        }
#pragma unroll
        for (int t = 0; t < TOKENS; ++t) {
#pragma unroll
            for (int r = 0; r < ROWS; ++r) total[t][r] = warp_sum(total[t][r]);
#if EPILOGUE == SWIGLU
#pragma unroll
            for (int r = 0; r < ROWS / 2; ++r) {
                const int row = task * (ROWS / 2) + r;
                if (lane == r && row < N)
                    out[t * pitch + row] = silu(total[t][r]) * total[t][r + ROWS / 2];
            }
#else
            float y = total[t][0];
#pragma unroll
            for (int r = 1; r < ROWS; ++r) y = lane == r ? total[t][r] : y;
#if EPILOGUE == CONV
            if (mixes && t < live) {  // window: TAPS - 1 lines, oldest first
                const elem last = from_float(y);
                line[TAPS - 1] = to_float(last);  // what later tokens will see of this one
                y = 0.0f;
#pragma unroll
                for (int i = 0; i < TAPS; ++i) y = fmaf(line[i], tap[i], y);
                y = silu(y);
#pragma unroll
                for (int i = 0; i + 1 < TAPS; ++i) line[i] = line[i + 1];
                elem* to = ladder ? ladder + t * ladder_pitch : window;
                if (ladder || t + 1 == live)
#pragma unroll
                    for (int i = 0; i + 1 < TAPS; ++i)
                        to[i * CHANNELS + mine] = from_float(line[i]);
            }
            if (finishes) out[t * pitch + mine] = y;
#elif EPILOGUE == RESIDUAL
            if (finishes) out[t * pitch + mine] = before[t] + y;
#else
            if (lane < ROWS && task * ROWS + lane < N) out[t * pitch + task * ROWS + lane] = y;
#endif
#endif
        }
    }
#if EPILOGUE == LOGITS
    // No other kernel of this fold reads them any more, and no block of this one does.
    if (position && blockIdx.x == 0 && threadIdx.x == 0) {
        *position += count ? *count : 1;
        if (counter) *counter += 1;
    }
#endif
}
