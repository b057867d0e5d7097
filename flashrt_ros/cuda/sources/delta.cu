// One token of the gated delta rule on the state in place; see kernels/delta.py for the formula.
//
// A block has one value head and DVS columns of its state, which it keeps in registers between
// reading and writing. mixed: fp32 [2 Hk DK + HV DV | HV DV (z) | HV (b) | HV (a)], convolved.
// What of the gated norm needs one value is done here: out = y * norm * silu(z). Its divisor needs
// whole heads: a block leaves its sum of y^2 in squares [HV][DV / DVS] for the next product.

#define GROUPS (DVS / 4)
#define SLOTS (256 / GROUPS)
#define LINES ((DK + SLOTS - 1) / SLOTS)

extern "C" __global__ void __launch_bounds__(256)
delta(const float* mixed, float* state, const float* neg_a, const float* dt_bias,
      const float* norm, float* out, float* squares, const char* ahead, i64 ahead_bytes) {
    __shared__ float q[DK], k[DK];
    __shared__ float4 parts[2][8][GROUPS];
    __shared__ float sums[3];
    const int head = blockIdx.y, tid = threadIdx.x, lane = tid % 32, warp = tid / 32;
    const int group = tid % GROUPS, slot = tid / GROUPS;
    const int column = blockIdx.x * DVS + group * 4;
    float* mine = state + (i64)head * DK * DV + column;
    start_next();
    float4 s[LINES];
#pragma unroll
    for (int i = 0; i < LINES; ++i) {  // this kernel alone writes this state within a graph
        const int line = slot + i * SLOTS;
        if (line < DK) s[i] = *(const float4*)(mine + line * DV);
    }
    if (tid == 0)
        ask_ahead(ahead, ahead_bytes, blockIdx.y * gridDim.x + blockIdx.x, gridDim.x * gridDim.y);
    const float bias = dt_bias[head], rate = neg_a[head];
    const float4 factor = *(const float4*)(norm + column);
    wait_inputs();
    const float* after = mixed + 2 * HK * DK + 2 * HV * DV;
    const float gate = after[HV + head], strength = after[head];
    const float4 v = *(const float4*)(mixed + 2 * HK * DK + head * DV + column);
    const float4 z = *(const float4*)(mixed + 2 * HK * DK + HV * DV + head * DV + column);
    const int key_head = head / (HV / HK);
    for (int d = tid; d < DK; d += 256) {
        q[d] = mixed[key_head * DK + d];
        k[d] = mixed[HK * DK + key_head * DK + d];
    }
    __syncthreads();
    if (warp < 3) {
        float sum = 0.0f;
        for (int d = lane; d < DK; d += 32)
            sum = fmaf(warp == 1 ? k[d] : q[d], warp == 0 ? q[d] : k[d], sum);
        sum = warp_sum(sum);
        if (lane == 0) sums[warp] = sum;
    }
    const float decay = expf(softplus(gate + bias) * rate);
    const float beta = 1.0f / (1.0f + expf(-strength));
    __syncthreads();
    const float q_unit = rsqrtf(sums[0] + 1e-6f), k_unit = rsqrtf(sums[1] + 1e-6f);
    float4 read_q = make_float4(0, 0, 0, 0), read_k = read_q;
#pragma unroll
    for (int i = 0; i < LINES; ++i) {
        const int line = slot + i * SLOTS;
        if (line >= DK) continue;
        const float a = q[line] * q_unit, b = k[line] * k_unit;
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
    if (lane < GROUPS) { parts[0][warp][group] = read_q; parts[1][warp][group] = read_k; }
    __syncthreads();
    read_q = read_k = make_float4(0, 0, 0, 0);
#pragma unroll
    for (int w = 0; w < 8; ++w) {
        const float4 a = parts[0][w][group], b = parts[1][w][group];
        read_q.x += a.x; read_q.y += a.y; read_q.z += a.z; read_q.w += a.w;
        read_k.x += b.x; read_k.y += b.y; read_k.z += b.z; read_k.w += b.w;
    }
    float4 d;
    d.x = (v.x - decay * read_k.x) * beta; d.y = (v.y - decay * read_k.y) * beta;
    d.z = (v.z - decay * read_k.z) * beta; d.w = (v.w - decay * read_k.w) * beta;
#pragma unroll
    for (int i = 0; i < LINES; ++i) {
        const int line = slot + i * SLOTS;
        if (line >= DK) continue;
        const float b = k[line] * k_unit;
        s[i].x = fmaf(b, d.x, s[i].x * decay); s[i].y = fmaf(b, d.y, s[i].y * decay);
        s[i].z = fmaf(b, d.z, s[i].z * decay); s[i].w = fmaf(b, d.w, s[i].w * decay);
        *(float4*)(mine + line * DV) = s[i];
    }
    if (warp) return;
    float sum = 0.0f;
    if (slot == 0) {
        const float scale = rsqrtf((float)DK), both = sums[2] * q_unit * k_unit;
        const float4 y = make_float4(
            (decay * read_q.x + both * d.x) * scale, (decay * read_q.y + both * d.y) * scale,
            (decay * read_q.z + both * d.z) * scale, (decay * read_q.w + both * d.w) * scale);
        *(float4*)(out + head * DV + column) = make_float4(
            y.x * factor.x * silu(z.x), y.y * factor.y * silu(z.y),
            y.z * factor.z * silu(z.z), y.w * factor.w * silu(z.w));
        sum = fmaf(y.x, y.x, fmaf(y.y, y.y, fmaf(y.z, y.z, y.w * y.w)));
    }
#pragma unroll
    for (int offset = GROUPS / 2; offset; offset >>= 1)
        sum += __shfl_xor_sync(0xffffffffu, sum, offset);
    if (tid == 0) squares[head * gridDim.x + blockIdx.x] = sum;
}
