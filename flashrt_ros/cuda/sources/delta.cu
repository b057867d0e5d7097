// The gated delta rule on the state in place, for one token or TOKENS in a row; see
// kernels/delta.py for the formula.
//
// A block has one value head and DVS columns of its state, which it keeps in registers between
// reading and writing. mixed: fp32, a token 2 Hk DK + HV DV | HV DV (z) | HV (b) | HV (a), convolved.
// What of the gated norm needs one value is done here: out = y * norm * silu(z). Its divisor needs
// whole heads: a block leaves its sum of y^2 in squares [TOKENS][HV][DV / DVS] for the product.
// *count of a block's tokens are live. A ladder, where there is one, takes the state after each
// token and the state itself stays.

#ifndef TOKENS
#define TOKENS 1
#endif
#define GROUPS (DVS / 4)
#define SLOTS (256 / GROUPS)
#define LINES ((DK + SLOTS - 1) / SLOTS)
#define WIDTH (2 * HK * DK + 2 * HV * DV + 2 * HV)

extern "C" __global__ void __launch_bounds__(256)
delta(const float* mixed, float* state, float* ladder, i64 ladder_pitch, const i64* count,
      const float* neg_a, const float* dt_bias, const float* norm, float* out, float* squares,
      const char* ahead, i64 ahead_bytes) {
    __shared__ float q[TOKENS][DK], k[TOKENS][DK];
    __shared__ float4 parts[2][2][8][GROUPS];
    __shared__ float sums[TOKENS][3];
    const int head = blockIdx.y, tid = threadIdx.x, lane = tid % 32, warp = tid / 32;
    const int group = tid % GROUPS, slot = tid / GROUPS;
    const int column = blockIdx.x * DVS + group * 4;
    const i64 mine = (i64)head * DK * DV + column;
    start_next();
    float4 s[LINES];
#pragma unroll
    for (int i = 0; i < LINES; ++i) {  // this kernel alone writes this state within a graph
        const int line = slot + i * SLOTS;
        if (line < DK) s[i] = *(const float4*)(state + mine + line * DV);
    }
    if (tid == 0)
        ask_ahead(ahead, ahead_bytes, blockIdx.y * gridDim.x + blockIdx.x, gridDim.x * gridDim.y);
    const float bias = dt_bias[head], rate = neg_a[head];
    const float4 factor = *(const float4*)(norm + column);
    wait_inputs();
    const int live = TOKENS > 1 ? (int)*count : 1;
    const int key_head = head / (HV / HK);
    float gate[TOKENS], strength[TOKENS];
    float4 v[TOKENS], z[TOKENS];
#pragma unroll
    for (int t = 0; t < TOKENS; ++t) {
        const float* row = mixed + t * WIDTH;
        const float* after = row + 2 * HK * DK + 2 * HV * DV;
        gate[t] = after[HV + head];
        strength[t] = after[head];
        v[t] = *(const float4*)(row + 2 * HK * DK + head * DV + column);
        z[t] = *(const float4*)(row + 2 * HK * DK + HV * DV + head * DV + column);
        for (int d = tid; d < DK; d += 256) {
            q[t][d] = row[key_head * DK + d];
            k[t][d] = row[HK * DK + key_head * DK + d];
        }
    }
    __syncthreads();
    for (int job = warp; job < 3 * TOKENS; job += 8) {
        const int t = job / 3, which = job % 3;
        float sum = 0.0f;
        for (int d = lane; d < DK; d += 32)
            sum = fmaf(which == 1 ? k[t][d] : q[t][d], which == 0 ? q[t][d] : k[t][d], sum);
        sum = warp_sum(sum);
        if (lane == 0) sums[t][which] = sum;
    }
    __syncthreads();
#pragma unroll
    for (int t = 0; t < TOKENS; ++t) {
        if (t >= live) break;
        const float decay = expf(softplus(gate[t] + bias) * rate);
        const float beta = 1.0f / (1.0f + expf(-strength[t]));
        const float q_unit = rsqrtf(sums[t][0] + 1e-6f), k_unit = rsqrtf(sums[t][1] + 1e-6f);
        float4 read_q = make_float4(0, 0, 0, 0), read_k = read_q;
#pragma unroll
        for (int i = 0; i < LINES; ++i) {
            const int line = slot + i * SLOTS;
            if (line >= DK) continue;
            const float a = q[t][line] * q_unit, b = k[t][line] * k_unit;
            read_q.x = fmaf(s[i].x, a, read_q.x); read_k.x = fmaf(s[i].x, b, read_k.x);
            read_q.y = fmaf(s[i].y, a, read_q.y); read_k.y = fmaf(s[i].y, b, read_k.y);
            read_q.z = fmaf(s[i].z, a, read_q.z); read_k.z = fmaf(s[i].z, b, read_k.z);
            read_q.w = fmaf(s[i].w, a, read_q.w); read_k.w = fmaf(s[i].w, b, read_k.w);
        }
#pragma unroll
        for (int offset = 16; offset >= GROUPS; offset >>= 1) {
#define ADD(v) v += __shfl_xor_sync(0xffffffffu, v, offset)
            ADD(read_q.x); ADD(read_q.y); ADD(read_q.z); ADD(read_q.w);
            ADD(read_k.x); ADD(read_k.y); ADD(read_k.z); ADD(read_k.w);
#undef ADD
        }
        float4 (&part)[2][8][GROUPS] = parts[t % 2];  // a barrier lies between two uses
        if (lane < GROUPS) { part[0][warp][group] = read_q; part[1][warp][group] = read_k; }
        __syncthreads();
        read_q = read_k = make_float4(0, 0, 0, 0);
#pragma unroll
        for (int w = 0; w < 8; ++w) {
            const float4 a = part[0][w][group], b = part[1][w][group];
            read_q.x += a.x; read_q.y += a.y; read_q.z += a.z; read_q.w += a.w;
            read_k.x += b.x; read_k.y += b.y; read_k.z += b.z; read_k.w += b.w;
        }
        float4 d;
        d.x = (v[t].x - decay * read_k.x) * beta; d.y = (v[t].y - decay * read_k.y) * beta;
        d.z = (v[t].z - decay * read_k.z) * beta; d.w = (v[t].w - decay * read_k.w) * beta;
        float* to = (ladder ? ladder + t * ladder_pitch : state) + mine;
        const bool keep = TOKENS == 1 || ladder || t + 1 == live;
#pragma unroll
        for (int i = 0; i < LINES; ++i) {
            const int line = slot + i * SLOTS;
            if (line >= DK) continue;
            const float b = k[t][line] * k_unit;
            s[i].x = fmaf(b, d.x, s[i].x * decay); s[i].y = fmaf(b, d.y, s[i].y * decay);
            s[i].z = fmaf(b, d.z, s[i].z * decay); s[i].w = fmaf(b, d.w, s[i].w * decay);
            if (keep) *(float4*)(to + line * DV) = s[i];
        }
        if (warp) continue;
        float sum = 0.0f;
        if (slot == 0) {
            const float scale = rsqrtf((float)DK), both = sums[t][2] * q_unit * k_unit;
            const float4 y = make_float4(
                (decay * read_q.x + both * d.x) * scale, (decay * read_q.y + both * d.y) * scale,
                (decay * read_q.z + both * d.z) * scale, (decay * read_q.w + both * d.w) * scale);
            *(float4*)(out + (t * HV + head) * DV + column) = make_float4(
                y.x * factor.x * silu(z[t].x), y.y * factor.y * silu(z[t].y),
                y.z * factor.z * silu(z[t].z), y.w * factor.w * silu(z[t].w));
            sum = fmaf(y.x, y.x, fmaf(y.y, y.y, fmaf(y.z, y.z, y.w * y.w)));
        }
#pragma unroll
        for (int offset = GROUPS / 2; offset; offset >>= 1)
            sum += __shfl_xor_sync(0xffffffffu, sum, offset);
        if (tid == 0) squares[(t * HV + head) * gridDim.x + blockIdx.x] = sum;
    }
}
