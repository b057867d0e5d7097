// Gated attention of a grid chunk; the position and the live count are read from the device.
//
// The GROUP query heads of a KV head stand as neighbouring query rows, p = t GROUP + g, so keys
// are read once for all of them. Keys are split by a size that depends on the position alone: SPLIT,
// doubled until MOST splits are enough. Splits of a row are joined in their order. Keys behind the
// live rows are never read.

#define WIDTH ((2 * GROUP + 2) * HK * D)
#define PACKED (SIZE * GROUP)

DEVICE int doublings_at(i64 position) {
    int doublings = 0;
    while (((i64)SPLIT * MOST << doublings) < position + SIZE) ++doublings;
    return doublings;
}
