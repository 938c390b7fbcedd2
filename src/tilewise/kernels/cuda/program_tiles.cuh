// A program's tiles, as all kernels handle them: rows of sums are written to the program's own rows, and tiles of the
// side that comes in steps are loaded, and hidden where the mask says so.
#pragma once
#include "product.cuh"
#include "tiles.cuh"

#if TW_LANDINGS && TW_FORWARD && TW_SPLIT
#define TW_LANDS 1
#else
#define TW_LANDS 0
#endif
#if TW_SPLIT && !TW_PRODUCTS && !TW_LANDS
#error "on FMA pipes the forward pass alone reads what was written before, and where the hardware copies it"
#endif

constexpr int KEY_TILE = 128;  // keys that lie side by side, a row for each dim, where K was written transposed

// Write the warp's rows of sums, each times its factor and its unit; rows from ``rows`` on are left alone.
template <int WIDTH>
TW_DEVICE void store_rows(const Tensor& tensor, float* head, const float (&sums)[ROWS][WIDTH / LANES],
                          const float (&factor)[ROWS], const float (&unit)[ROWS], int first, int rows, int width) {
#pragma unroll
  for (int r = 0; r < ROWS; r++) {
    int s = first + Product::row_of(r);
    if (s >= rows) continue;
    float* row = head + s * tensor.s;
#pragma unroll
    for (int e = 0; e < WIDTH / LANES; e += 4) {
      int column = Product::quad_of(e);
      if (column >= width) continue;
      // A factor of 0 stands for a row that is zero, whatever was summed.
      float4 x = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
      if (factor[r] != 0.0f)
        x = make_float4(sums[r][e] * factor[r] * unit[r], sums[r][e + 1] * factor[r] * unit[r],
                        sums[r][e + 2] * factor[r] * unit[r], sums[r][e + 3] * factor[r] * unit[r]);
      if (width % 4 == 0) {  // our own tensors are dense: then every row begins at a multiple of 16 bytes
        *reinterpret_cast<float4*>(row + column) = x;
      } else {
        row[column] = x.x;
        if (column + 1 < width) row[column + 1] = x.y;
        if (column + 2 < width) row[column + 2] = x.z;
        if (column + 3 < width) row[column + 3] = x.w;
      }
    }
  }
}

// Tiles of the side that comes in steps: split as they come, rows with their factors, or by whoever copied them.
template <int N, int WIDTH, int STRIDE>
TW_DEVICE void load_step(float* tile, const Tensor& tensor, const float* head, int first, int from, int to, int width) {
#if TW_SPLIT
  load_tile<N, STRIDE, STRIDE, true>(tile, tensor, head, first, from, to, STRIDE);
#else
  load_tile<N, WIDTH, STRIDE>(tile, tensor, head, first, from, to, width);
#endif
}

template <int N, int WIDTH, int STRIDE>
TW_DEVICE void prepare_step(float* tile) {
#if !TW_SPLIT
  Product::prepare<N, WIDTH, STRIDE>(tile);
#endif
}

// Put ``value`` wherever a query of the warp's does not see its key; keys n on, of which nobody sees ``to`` and later.
template <int N>
TW_DEVICE void hide(float (&tile)[ROWS][N / LANES], float value, const Place& at, int own, int n, int to) {
#pragma unroll
  for (int r = 0; r < ROWS; r++)
#pragma unroll
    for (int c = 0; c < N / LANES; c++) {
      int j = n + Product::column_of(c);
      if (j >= to || !at.sees(own + Product::row_of(r), j)) tile[r][c] = value;
    }
}
