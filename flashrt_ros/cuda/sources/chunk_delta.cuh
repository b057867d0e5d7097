// The gated delta rule of a grid chunk on tensor cores, in its chunked form (WY representation of
// Yang et al. 2024, arXiv 2406.06484, with decay).
//
// SUB tokens at a time. With G the decays summed up within them, all inside of a block of SUB is
// prepared for all blocks and heads at once:
//
//     A = strictly lower (beta_i exp(G_i - G_j) k_i k_j),  T = (I + A)^-1
//     W = T diag(beta exp(G)) K,  U = T diag(beta) V,  P = lower (exp(G_i - G_j) q_i k_j)
//
// and the scan has three short products left for each of them:
//
//     N = U - W S,  O = diag(exp(G)) Q S + P N,  S <- exp(G_end) S + K^T diag(exp(G_end - G)) N
//
// The state stays fp32 and enters products as the sum of two bfloat16. Exponents are never above
// zero. Queries and keys stay as the convolution leaves them: their lengths are factors of tokens.
//
// What the scan reads lies in memory in the order of its mma fragments, in "units" of one 16-byte
// vector a lane: 8 columns by 32 values of the summed-over dimension. So it is copied as it is, and
// read without a bank conflict.

#define WIDTH (CHANNELS + HV * DV + 2 * HV)
#define TILES (SUB / 8)   // of tokens
#define KEYS (DK / 32)    // units over the keys
#define PASTS (SUB / 32)  // units over the tokens
#define SEEN (TILES + (PASTS - 1) * (TILES - 4))  // units of P that are not above its diagonal

// Where the unit of P for a tile of 8 queries and 32 keys lies.
DEVICE int seen_at(int tile, int past) { return past * (TILES - 4) + tile; }
