// The causal short convolution of a grid chunk with SiLU, rounded to bfloat16.

#if ELEMENT == 16
struct Taps { float2 of[TAPS]; };  // of two channels

DEVICE Taps load_taps(const float* taps, int channel) {
    Taps tap;
#pragma unroll
    for (int i = 0; i < TAPS; ++i) tap.of[i] = *(const float2*)(taps + i * CHANNELS + channel);
    return tap;
}

// Inputs of two channels for RUN tokens from `first`, a multiple of it, and it is no less than the
// window. No branches: all loads are on their way together. A dead token is read, and nothing
// comes of it.
template <int RUN>
DEVICE void load_rows(u32 (&x)[TAPS - 1 + RUN], const elem* mixed, const elem* window,
                      int channel, int first) {
    static_assert(RUN >= TAPS - 1, "");
    const elem* row = mixed + (first - (TAPS - 1)) * WIDTH + channel;
    const elem* past = first ? row : window + channel;
    const int step = first ? WIDTH : CHANNELS;
#pragma unroll
    for (int i = 0; i < TAPS - 1 + RUN; ++i)
        x[i] = *(const u32*)(i < TAPS - 1 ? past + i * step : row + i * WIDTH);
}

// Two channels of RUN tokens from `first`: convolution and SiLU; zeros for the dead.
template <int RUN, class Put>
DEVICE void smooth(const u32 (&x)[TAPS - 1 + RUN], const Taps& tap, int first, int live, Put put) {
#pragma unroll
    for (int i = 0; i < RUN; ++i) {
        float a = 0.0f, b = 0.0f;
#pragma unroll
        for (int j = 0; j < TAPS; ++j) {
            a = fmaf(__uint_as_float(x[i + j] << 16), tap.of[j].x, a);
            b = fmaf(__uint_as_float(x[i + j] & 0xffff0000u), tap.of[j].y, b);
        }
        const u32 alive = (u32)((first + i - live) >> 31);
        // a sigmoid of both with one division; where an exponent is capped nothing is left
        const float c = 1.0f + fast_exp2(fminf(-1.44269504f * a, 60.0f));
        const float d = 1.0f + fast_exp2(fminf(-1.44269504f * b, 60.0f));
        const float inverse = fast_inverse(c * d);
        put(i, pack_bf16(a * d * inverse, b * c * inverse) & alive);
    }
}

// The same to shared memory, for any `first`.
template <int RUN>
DEVICE void convolve(const elem* mixed, const elem* window, const Taps& tap, int channel,
                     int first, int live, elem* to, int pitch) {
    u32 x[TAPS - 1 + RUN];
    const elem* row = mixed + (first - (TAPS - 1)) * WIDTH + channel;
#pragma unroll
    for (int i = 0; i < TAPS - 1 + RUN; ++i)
        x[i] = *(const u32*)(i < TAPS - 1 && first + i < TAPS - 1
                                 ? window + (first + i) * CHANNELS + channel : row + i * WIDTH);
    smooth<RUN>(x, tap, first, live, [&](int i, u32 of) { *(u32*)(to + i * pitch) = of; });
}
#endif
