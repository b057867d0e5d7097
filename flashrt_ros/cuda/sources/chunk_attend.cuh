// Gated attention of a grid chunk; the position and the live count are read from the device.
//
// The GROUP query heads of a KV head stand as neighbouring query rows, p = t GROUP + g, so keys
// are read once for all of them. Keys are dealt out evenly to at most MOST splits of SPLIT or
// more, in whole tiles of KEYS; how many follows from the position alone. Splits of a row are
// joined in their order. Keys behind the live rows are never read.

#define WIDTH ((2 * GROUP + 2) * HK * D)
#define PACKED (SIZE * GROUP)

// Keys of a split.
DEVICE int split_at(i64 position) {
    const int keys = (int)position + SIZE, splits = min(MOST, (keys + SPLIT - 1) / SPLIT);
    return (keys + splits * KEYS - 1) / (splits * KEYS) * KEYS;
}
