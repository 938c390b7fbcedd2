// The two tile products on FMA pipes; product.cuh says what they are.
//
// Every product and sum is rounded once, as IEEE 754 has it. A warp owns 4 TW_BLOCKS rows, each of LANES threads; a
// thread ROWS of them, so that each number loaded from shared memory serves several products. Lanes 1 apart share
// columns, those 2 apart rows: half a warp's 16-byte loads are one read of 128 bytes where either kind shares its
// address, else two.
//
// Registers lie in two banks, odd and even, each read once a cycle; what the instruction before has read in the same
// place costs nothing. So a product takes one cycle where row or column stays, and the sum is in the other bank than
// what changes. By counting, ptxas gets to 1.25 issue slots and cycles a product for 8 rows by 8 columns of numbers
// that lie side by side, 4 to a load; to 1.7 for 4 rows by 8 where 4 dims of a row do.
#pragma once
#include "scores.cuh"
#include "tiles.cuh"

struct Product {
#if TW_FORWARD
  static constexpr int LANES = TW_DV % 64 ? 8 : 16;
#else
  static constexpr int LANES = 8;
#endif
  static constexpr int ROWS = TW_BLOCKS * LANES / 8, OWN = 4 * TW_BLOCKS, PAD = 4;
  static constexpr int SUM_ROWS = 4, SUM_GROUP = 32;  // of rows by columns: rows a thread, columns a group
  static constexpr float UNIT = 1.0f;
  static constexpr int SCRATCH_STRIDE = OWN + 4, SCRATCH = TW_OTHERS * SCRATCH_STRIDE;  // floats a warp

  static TW_DEVICE int lane() { return thread_index() % 32; }
  static TW_DEVICE int lane_row() { return lane() / (2 * LANES) * 2 + lane() % 2; }
  static TW_DEVICE int lane_column() { return lane() / 2 % LANES; }
  static TW_DEVICE int row_of(int r) { return r / 4 * (128 / LANES) + lane_row() * 4 + r % 4; }
#if TW_FORWARD
  static TW_DEVICE int column_of(int c) { return quad_of(c); }
#else
  static TW_DEVICE int column_of(int c) { return c * LANES + lane_column(); }
#endif
  static TW_DEVICE int quad_of(int e) { return e / 4 * (4 * LANES) + lane_column() * 4 + e % 4; }
  static TW_DEVICE int sum_row_of(int r) { return lane_row() * 4 + r; }

  template <int N, int WIDTH, int STRIDE>
  static TW_DEVICE void prepare(float*) {}  // used as they are

  template <int COUNT>
  static TW_DEVICE void load_quads(float (&x)[COUNT], const float* from, int apart) {
#pragma unroll
    for (int i = 0; i < COUNT; i += 4) {
      float4 quad = *reinterpret_cast<const float4*>(from + i / 4 * apart);
      x[i] = quad.x;
      x[i + 1] = quad.y;
      x[i + 2] = quad.z;
      x[i + 3] = quad.w;
    }
  }

  // The first COLUMNS of sums += a^T b over ``depth`` rows of a and b, a multiple of 8: the warp's columns of a begin
  // at ``a``. SWAPPED: the columns of a have changed places with their neighbours. Loads are a row ahead of products
  // where registers allow it: two warps to a scheduler do not hide what a load takes.
  template <int COLUMNS, int A_STRIDE, int B_STRIDE, bool SWAPPED, int ALL>
  static TW_DEVICE void columns_by_columns(float (&sums)[ROWS][ALL], const float* a, const float* b, int depth) {
    const float* a_lane = a + row_of(0);
    const float* b_lane = b + quad_of(0);
    constexpr int AHEAD = TW_DV <= 128;
    float x[1 + AHEAD][ROWS], y[1 + AHEAD][COLUMNS];
    auto load = [&](int to) {
      load_quads(x[to], a_lane, 128 / LANES);
      load_quads(y[to], b_lane, 4 * LANES);
      a_lane += A_STRIDE;
      b_lane += B_STRIDE;
    };
    if (AHEAD) load(0);
#pragma unroll 1
    for (int n = 0; n < depth; n += 8) {
#pragma unroll
      for (int i = 0; i < 8; i++) {
        if (!AHEAD || i < 7 || n + 8 < depth) load((i + 1) % (1 + AHEAD));
#pragma unroll
        for (int c = 0; c < COLUMNS; c++)
#pragma unroll
          for (int r = 0; r < ROWS; r++) sums[r][c] += x[i % (1 + AHEAD)][SWAPPED ? r ^ 1 : r] * y[i % (1 + AHEAD)][c];
      }
    }
  }

  template <int N, int WIDTH, int STRIDE, bool SCALED = false>
  static TW_DEVICE void rows_by_rows(float (&scores)[ROWS][N / LANES], const float* a, const float* b,
                                     float scale = 1.0f) {
#pragma unroll
    for (int r = 0; r < ROWS; r++)
#pragma unroll
      for (int c = 0; c < N / LANES; c++) scores[r][c] = 0.0f;
    const float* a_lane = a + row_of(0) * STRIDE;
    const float* b_lane = b + column_of(0) * STRIDE;
#pragma unroll 4
    for (int d = 0; d < WIDTH; d += 4, a_lane += 4, b_lane += 4) {
      float x[4 * ROWS];
      load_quads(x, a_lane, STRIDE);
#pragma unroll
      for (int c = 0; c < N / LANES; c++) {
        float y[4];
        load_quads(y, b_lane + c * LANES * STRIDE, 0);
#pragma unroll
        for (int r = 0; r < ROWS; r++)
#pragma unroll
          for (int i = 0; i < 4; i++) scores[r][c] += x[r * 4 + i] * y[i];
      }
    }
    if (SCALED) scale_scores(scores, scale);
  }

  // The tile to the warp's own shared memory, column by column, for every thread needs whole columns of it. Two rows
  // change places: a 16-byte store wants the first in an even register, and a product wants its sum in a register of
  // the other bank than row and column, whose first are even too.
  template <int COLUMNS>
  static TW_DEVICE void store_transposed(float* scratch, const float (&tile)[ROWS][COLUMNS]) {
    synchronize_warp();
#pragma unroll
    for (int c = 0; c < COLUMNS; c++)
#pragma unroll
      for (int r = 0; r < ROWS; r += 4)
        *reinterpret_cast<float4*>(scratch + column_of(c) * SCRATCH_STRIDE + row_of(r)) =
            make_float4(tile[r + 1][c], tile[r][c], tile[r + 3][c], tile[r + 2][c]);
    synchronize_warp();
  }

  // sums = sums * decay + tile columns, for DEPTH columns of the tile, which are in the warp's shared memory, or the
  // first ``depth``, a multiple of 8. Their products are added to the others at the end: 4096 keys summed one after
  // another err by three times as much.
  template <int DEPTH, int WIDTH, int STRIDE>
  static TW_DEVICE void add_tile_by_columns(float (&sums)[ROWS][WIDTH / LANES], const float (&decay)[ROWS],
                                            const float* tile, const float* columns, int depth = DEPTH) {
    static_assert(WIDTH % 32 == 0 && DEPTH % 8 == 0, "columns come in groups of 32, rows of 8");
    constexpr int ALL = WIDTH / LANES, MOST = 64 / ROWS;  // registers of a part are 64 at most
#pragma unroll
    for (int first = 0; first < ALL; first += MOST) {
      constexpr int COLUMNS = ALL < MOST ? ALL : MOST;
      float part[ROWS][COLUMNS];
#pragma unroll
      for (int r = 0; r < ROWS; r++)
#pragma unroll
        for (int c = 0; c < COLUMNS; c++) part[r][c] = 0.0f;
      columns_by_columns<COLUMNS, SCRATCH_STRIDE, STRIDE, true>(part, tile, columns + first * LANES, depth);
#pragma unroll
      for (int r = 0; r < ROWS; r++)
#pragma unroll
        for (int c = 0; c < COLUMNS; c++)
          if (first + c < ALL) sums[r][first + c] = sums[r][first + c] * decay[r] + part[r][c];
    }
  }

  template <int N, int WIDTH, int STRIDE, bool ARE_PROBS>
  static TW_DEVICE void tile_by_columns(float (&sums)[ROWS][WIDTH / LANES], const float (&decay)[ROWS],
                                        const float (&tile)[ROWS][N / LANES], const float* columns, float (&)[ROWS],
                                        float* scratch) {
    store_transposed(scratch, tile);
    add_tile_by_columns<N, WIDTH, STRIDE>(sums, decay, scratch, columns);
  }

  // sums = a b for 16 rows of a, of its columns [from, to) by 16, each OWN of which are a tile of their own, and every
  // APART-th group of 32 columns of b from ``group`` on. A group behind b's last sums up what lies there, for nobody.
  template <int GROUPS, int APART, int WIDTH, int A_STRIDE, int B_STRIDE>
  static TW_DEVICE void rows_by_columns(float (&sums)[GROUPS][4 * SUM_ROWS], const float* a, const float* b, int from,
                                        int to, int group) {
#pragma unroll
    for (int g = 0; g < GROUPS; g++)
#pragma unroll
      for (int e = 0; e < 4 * SUM_ROWS; e++) sums[g][e] = 0.0f;
    const float* b_lane = b + from * B_STRIDE + group * SUM_GROUP + quad_of(0);
#pragma unroll 1
    for (int own = from; own < to; own += OWN) {
      const float* a_lane = a + own / OWN * SCRATCH + sum_row_of(0) * A_STRIDE;
#pragma unroll 2
      for (int n = 0; n < OWN; n += 4, a_lane += 4) {
        float x[4 * SUM_ROWS];
        load_quads(x, a_lane, A_STRIDE);
#pragma unroll
        for (int i = 0; i < 4; i++, b_lane += B_STRIDE) {
          float y[4 * GROUPS];
          load_quads(y, b_lane, APART * SUM_GROUP);
#pragma unroll
          for (int g = 0; g < GROUPS; g++)
#pragma unroll
            for (int r = 0; r < SUM_ROWS; r++)
#pragma unroll
              for (int e = 0; e < 4; e++) sums[g][r * 4 + e] += x[r * 4 + (i ^ 1)] * y[g * 4 + e];
        }
      }
    }
  }
};
