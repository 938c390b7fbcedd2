// The two tile products, as functions of a struct Product: one of three, which TW_PRODUCTS asks for. The
// sizes of a program's tiles, which follow from it, are below.
//
// A tensor core adds with truncation, which pulls a sum toward zero at each addition. So it sums up one tile, or a
// chunk of dims, at a time; ordinary additions do the rest.
//
// A warp owns OWN rows; a thread of it ROWS of these, row_of(r), and of N columns N / LANES, column_of(c); the LANES
// threads that share a row are neighbours by shuffle_xor. A row of sums of E numbers is held in quads of neighbouring
// columns that begin at quad_of(e).
#pragma once

#if TW_PRODUCTS == 3
#include "product_halves.cuh"
#elif TW_PRODUCTS
#include "product_tf32.cuh"
#else
#include "product_fma.cuh"
#endif

constexpr int ROWS = Product::ROWS, LANES = Product::LANES;
constexpr int TW_ROWS = Product::OWN * TW_WARPS;
constexpr int STRIDE = TW_D + Product::PAD, STRIDE_V = TW_DV + Product::PAD;
constexpr int NEIGHBOUR = TW_PRODUCTS ? 1 : 2;  // what lanes of neighbours in a row differ by
// Steps of the other side in shared memory. On FMA pipes one will do, and may be longer: while one of its tiles is
// multiplied, the other is loaded.
constexpr int STEPS = TW_PRODUCTS ? 2 : 1;
