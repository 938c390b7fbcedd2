// Tiles in shared memory, and how they get there: as they are, transposed, and one number a row.
//
// A tile is ROWS rows of WIDTH floats, STRIDE apart. Rows outside [from, to) are zeros and are not read: what nobody
// sees may hold NaN.
#pragma once
#include "call.cuh"

TW_DEVICE int warp_index() { return thread_index() / 32; }

// A warp copies 4 rows at a time, 8 threads a row; whoever copied a number may read it as soon as it has waited.
template <int ROWS, int WIDTH, int STRIDE, bool VECTORS = TW_VECTORS>
TW_DEVICE void load_tile(float* tile, const Tensor& tensor, const float* head, int first, int from, int to, int width) {
  int own = thread_index() / 8, column = thread_index() % 8 * 4;
  const float* source = head + (first + own) * tensor.s + column * tensor.d;
  float* target = tile + own * STRIDE + column;
#pragma unroll
  for (int row = 0; row < ROWS; row += TW_THREADS / 8) {
    int s = first + row + own;
    bool seen = from <= s && s < to;
#pragma unroll
    for (int i = 0; i < WIDTH; i += 32) {
      if (row + own >= ROWS || column + i >= WIDTH) continue;
      if (VECTORS) {
        copy16(target + row * STRIDE + i, source + i, seen && column + i < width);
        continue;
      }
      for (int e = i; e < i + 4; e++)
        copy4(target + row * STRIDE + e, source + e * tensor.d, seen && column + e < width);
    }
    source += TW_THREADS / 8 * tensor.s;
  }
}

// The same for WIDTH dims from ``dim`` on, transposed: a row for each dim, STRIDE apart, of ROWS floats. A warp writes
// 8 dims of 4 neighbours at a time, to 32 banks where STRIDE is 4 more than a multiple of 32.
template <int ROWS, int WIDTH, int STRIDE>
TW_DEVICE void load_transposed(float* tile, const Tensor& tensor, const float* head, int first, int from, int to,
                               int dim, int width) {
  int own = thread_index() / 8, lane_dim = thread_index() % 8;
  const long long apart = TW_VECTORS ? 1 : tensor.d;
  const float* source = head + (first + own) * tensor.s + (dim + lane_dim) * apart;
  float* target = tile + lane_dim * STRIDE + own;
#pragma unroll
  for (int row = 0; row < ROWS; row += TW_THREADS / 8) {
    int s = first + row + own;
    bool seen = from <= s && s < to;
#pragma unroll
    for (int e = 0; e < WIDTH; e += 8) {
      if (row + own >= ROWS || lane_dim + e >= WIDTH) continue;
      copy4(target + e * STRIDE + row, source + e * apart, seen && dim + lane_dim + e < width);
    }
    source += TW_THREADS / 8 * tensor.s;
  }
}

// One number a row: lse or delta.
template <int ROWS>
TW_DEVICE void load_numbers(float* numbers, const float* source, int first, int from, int to) {
#pragma unroll
  for (int begin = 0; begin < ROWS; begin += TW_THREADS) {
    int row = begin + thread_index(), s = first + row;
    if (row >= ROWS) continue;
    bool inside = from <= s && s < to;
    copy4(numbers + row, inside ? source + s : source, inside);
  }
}
