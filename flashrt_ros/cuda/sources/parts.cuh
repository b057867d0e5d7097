// Numbers as the sum of two bfloat16, and where they lie for products.

#if ELEMENT == 16
// Two numbers, and what rounding them left out.
DEVICE void split(u32& high, u32& low, float x, float y) {
    high = pack_bf16(x, y);
    low = pack_bf16(x - bf16_float(high & 0xffff), y - bf16_float(high >> 16));
}

// Put a tile where it is half of the first operand of a product over 16 of its columns.
DEVICE void put(uint4* to, int tile, int lane, u32 x, u32 y) {
    ((uint2*)(to + tile / 2 * 32 + lane))[tile % 2] = make_uint2(x, y);
}
#endif
