// The two tile products on tensor cores, through one product of TF32, rounded to the nearest; product.cuh says what
// they are.
#pragma once
#include "scores.cuh"
#include "tiles.cuh"

struct Product {
  static constexpr int LANES = 4, ROWS = 2 * TW_BLOCKS, OWN = 16 * TW_BLOCKS, PAD = 8;
  static constexpr float UNIT = 1.0f;
  static constexpr int SCRATCH = 0;

  // Rows and columns are numbered so that 16-byte loads of shared memory meet no bank twice, with one stride for both
  // products: place(2c) = c and place(2c + 1) = 4 + (c ^ 2), rows c (and place(2c + 1)) being 8 banks apart from one
  // another and two neighbours of a quarter warp 16.
  static TW_DEVICE int place(int g) { return g & 1 ? 4 + (g >> 1 ^ 2) : g >> 1; }
  static TW_DEVICE int lane() { return thread_index() % 32; }
  static TW_DEVICE int row_of(int r) { return r / 2 * 16 + r % 2 * 8 + place(lane() / 4); }
  static TW_DEVICE int column_of(int c) { return c / 2 * 8 + place(lane() % 4 * 2 + c % 2); }
  static TW_DEVICE int quad_of(int e) { return e / 8 * 32 + lane() % 4 * 8 + e % 8; }

  template <int N, int WIDTH, int STRIDE>
  static TW_DEVICE void prepare(float*) {}  // used as they are

  // Add to the 16 x 8 sums of block m whose columns a thread holds as 2n and 2n + 1.
  template <int COLUMNS>
  static TW_DEVICE void add_product(float (&sums)[ROWS][COLUMNS], int m, int n, const float (&a)[4], float b0,
                                    float b1) {
    multiply_tiles(sums[2 * m][2 * n], sums[2 * m][2 * n + 1], sums[2 * m + 1][2 * n], sums[2 * m + 1][2 * n + 1], a,
                   b0, b1);
  }

  static TW_DEVICE void load_rounded(float (&x)[4], const float* quad) {
    float4 exact = *reinterpret_cast<const float4*>(quad);
    x[0] = nearest_tf32(exact.x);
    x[1] = nearest_tf32(exact.y);
    x[2] = nearest_tf32(exact.z);
    x[3] = nearest_tf32(exact.w);
  }

  // scores = scale a b^T over WIDTH dims, as above; the warp's rows of a begin at ``a``. Dims are numbered so that lane
  // c's share of two steps of 8 is 4 neighbours.
  template <int N, int WIDTH, int STRIDE, bool SCALED = false>
  static TW_DEVICE void rows_by_rows(float (&scores)[ROWS][N / LANES], const float* a, const float* b,
                                     float scale = 1.0f) {
    constexpr int CHUNK = WIDTH < 64 ? WIDTH : 64;
#pragma unroll
    for (int r = 0; r < ROWS; r++)
#pragma unroll
      for (int c = 0; c < N / LANES; c++) scores[r][c] = 0.0f;
    const float* a_lane = a + place(lane() / 4) * STRIDE + lane() % 4 * 4;
    const float* b_lane = b + place(lane() / 4) * STRIDE + lane() % 4 * 4;
#pragma unroll 1
    for (int first = 0; first < WIDTH; first += CHUNK) {
      float sums[ROWS][N / LANES];
#pragma unroll
      for (int r = 0; r < ROWS; r++)
#pragma unroll
        for (int c = 0; c < N / LANES; c++) sums[r][c] = 0.0f;
#pragma unroll 2
      for (int d = first; d < first + CHUNK && d < WIDTH; d += 16) {
        float left[TW_BLOCKS][2][4];  // [block][step of 8 dims][fragment]
#pragma unroll
        for (int m = 0; m < TW_BLOCKS; m++)
#pragma unroll
          for (int half = 0; half < 2; half++) {
            float x[4];
            load_rounded(x, a_lane + (m * 16 + half * 8) * STRIDE + d);
#pragma unroll
            for (int i = 0; i < 4; i++) left[m][i / 2][half + i % 2 * 2] = x[i];
          }
#pragma unroll
        for (int n = 0; n < N / 8; n++) {
          float x[4];
          load_rounded(x, b_lane + n * 8 * STRIDE + d);
#pragma unroll
          for (int step = 0; step < 2; step++)
#pragma unroll
            for (int m = 0; m < TW_BLOCKS; m++)
              add_product(sums, m, n, left[m][step], x[2 * step], x[2 * step + 1]);
        }
      }
#pragma unroll
      for (int r = 0; r < ROWS; r++)
#pragma unroll
        for (int c = 0; c < N / LANES; c++) scores[r][c] += sums[r][c];
    }
    if (SCALED) scale_scores(scores, scale);
  }

  // sums = sums * decay + tile columns. What a thread holds of a tile of scores is just what it has to hand to the
  // tensor core as the left operand.
  template <int N, int WIDTH, int STRIDE, bool ARE_PROBS>
  static TW_DEVICE void tile_by_columns(float (&sums)[ROWS][WIDTH / LANES], const float (&decay)[ROWS],
                                        const float (&tile)[ROWS][N / LANES], const float* columns, float (&)[ROWS],
                                        float*) {
    static_assert(WIDTH % 32 == 0, "columns come in groups of 32");
    float rounded[ROWS][N / LANES];
#pragma unroll
    for (int r = 0; r < ROWS; r++)
#pragma unroll
      for (int c = 0; c < N / LANES; c++) rounded[r][c] = nearest_tf32(tile[r][c]);
    const float* lane_row = columns + lane() / 4 * 4;
#pragma unroll
    for (int group = 0; group < WIDTH / 32; group++) {
      float part[ROWS][8];  // [2 i + h]: column i of quad h
#pragma unroll
      for (int r = 0; r < ROWS; r++)
#pragma unroll
        for (int e = 0; e < 8; e++) part[r][e] = 0.0f;
#pragma unroll
      for (int n = 0; n < N / 8; n++) {
        float x[2][4];
#pragma unroll
        for (int half = 0; half < 2; half++)
          load_rounded(x[half], lane_row + (n * 8 + place(lane() % 4 * 2 + half)) * STRIDE + group * 32);
#pragma unroll
        for (int m = 0; m < TW_BLOCKS; m++) {
          float left[4];  // rows g and g + 8 of column place(2c), then of place(2c + 1)
#pragma unroll
          for (int f = 0; f < 4; f++) left[f] = rounded[2 * m + f % 2][2 * n + f / 2];
#pragma unroll
          for (int i = 0; i < 4; i++) add_product(part, m, i, left, x[0][i], x[1][i]);  // i-th of each lane's quads
        }
      }
#pragma unroll
      for (int r = 0; r < ROWS; r++)
#pragma unroll
        for (int e = 0; e < 8; e++)
          sums[r][group * 8 + e] = sums[r][group * 8 + e] * decay[r] + part[r][e % 4 * 2 + e / 4];
    }
  }
};
