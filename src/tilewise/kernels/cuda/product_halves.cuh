// The two tile products on tensor cores, through three products of halves; product.cuh says what they are.
//
// A row times a power of two, which brings its largest number L between 2^14 and 2^15, is big + small, both halves, of
// 11 bits each. Then a b = small big + big small + big big, and only small small, below 2^-22 of a b, is left out. The
// error of big + small is at most 2^-23 of the number or 2^-39 of L, whichever is more: numbers below 2^-16 of L have
// fewer bits.
//
// A tile is split where it was copied to: 16 columns become big and small of two blocks of 8, of which the first has
// columns 4c and 4c + 1, the second 4c + 2 and 4c + 3. The factor that leads back stands behind its row,
// NaN where the row holds an infinity: then all that the row is a factor of is NaN.
#pragma once
#include "tiles.cuh"

struct Product {
  static constexpr int LANES = 4, ROWS = 2 * TW_BLOCKS, OWN = 16 * TW_BLOCKS, PAD = 4;
  static constexpr int SUM_ROWS = 2, SUM_GROUP = 16;  // of rows by columns: rows a thread, columns a group
  static constexpr float UNIT = 0x1p-126f;  // of sums to begin with
  static constexpr int SCRATCH = 0;

  static TW_DEVICE int lane() { return thread_index() % 32; }
  static TW_DEVICE int row_of(int r) { return r / 2 * 16 + r % 2 * 8 + lane() / 4; }
  static TW_DEVICE int column_of(int c) { return c / 2 * 8 + lane() % 4 * 2 + c % 2; }
  static TW_DEVICE int quad_of(int e) { return e / 4 * 16 + lane() % 4 * 4 + e % 4; }
  static TW_DEVICE int sum_row_of(int r) { return r * 8 + lane() / 4; }

  // The power of two that brings ``largest`` between 2^14 and 2^15, and what leads back.
  static TW_DEVICE void scale_to_halves(float largest, float& there, float& back) {
    int exponent = most(__float_as_int(largest) >> 23, 15);
    there = __int_as_float((268 - exponent) << 23);
    back = __int_as_float(exponent == 255 ? 0x7fffffff : (exponent - 14) << 23);
  }

  static TW_DEVICE void split(float x, float y, unsigned& big, unsigned& small) {
    big = pack_halves(x, y);
    small = pack_halves(x - first_half(big), y - second_half(big));
  }

  // Split what this thread has copied.
  template <int N, int WIDTH, int STRIDE>
  static TW_DEVICE void prepare(float* tile) {
#pragma unroll
    for (int first = 0; first < N; first += TW_THREADS / 8) {
      int row = first + thread_index() / 8;
      if (N % (TW_THREADS / 8) && row >= N) continue;  // all of a warp's rows
      float* group = tile + row * STRIDE;
      float4 x[(WIDTH + 31) / 32];
      float largest = 0.0f, there, back;
#pragma unroll
      for (int i = 0; i < (WIDTH + 31) / 32; i++) {
        int column = i * 32 + lane() % 8 * 4;
        x[i] = column < WIDTH ? *reinterpret_cast<float4*>(group + column) : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        largest = fmaxf(fmaxf(largest, fmaxf(fabsf(x[i].x), fabsf(x[i].y))), fmaxf(fabsf(x[i].z), fabsf(x[i].w)));
      }
#pragma unroll
      for (int mask = 1; mask < 8; mask *= 2) largest = fmaxf(largest, shuffle_xor(largest, mask));
      scale_to_halves(largest, there, back);
      synchronize_warp();  // 8 threads have read the row
#pragma unroll
      for (int i = 0; i < (WIDTH + 31) / 32; i++) {
        if (i * 32 + lane() % 8 * 4 >= WIDTH) continue;
        unsigned* block = reinterpret_cast<unsigned*>(group) + i * 32 + lane() % 8 / 4 * 16 + lane() % 4;
        split(x[i].x * there, x[i].y * there, block[0], block[4]);
        split(x[i].z * there, x[i].w * there, block[8], block[12]);
      }
      if (lane() % 8 == 0) group[WIDTH] = back;
    }
  }

  static TW_DEVICE void add_product(float (&sums)[TW_BLOCKS][4], int m, const unsigned (&a)[4], unsigned b0,
                                    unsigned b1) {
    multiply_halves(sums[m][0], sums[m][1], sums[m][2], sums[m][3], a, b0, b1);
  }

  // scores = scale a b^T over WIDTH dims, with a scale of 1 unless SCALED; the warp's rows of a begin at ``a``. big big
  // is summed apart from the others, whose truncated bits are 2^-11 times as large.
  template <int N, int WIDTH, int STRIDE, bool SCALED = false>
  static TW_DEVICE void rows_by_rows(float (&scores)[ROWS][N / LANES], const float* a, const float* b,
                                     float scale = 1.0f) {
    constexpr int CHUNK = WIDTH < 128 ? WIDTH : 128, UNROLL = WIDTH == 128 ? 4 : 2;
    float cross[N / 8][TW_BLOCKS][4];  // small big + big small
#pragma unroll
    for (int n = 0; n < N / 8; n++)
#pragma unroll
      for (int m = 0; m < TW_BLOCKS; m++)
#pragma unroll
        for (int f = 0; f < 4; f++) cross[n][m][f] = 0.0f;
    const float* a_row = a + lane() % 16 * STRIDE + lane() / 16 * 8;                    // two of rows, of columns
    const float* b_row = b + lane() % 8 * STRIDE + lane() / 8 % 2 * 8 + lane() / 16 * 4;  // of columns, big and small
#pragma unroll 1
    for (int first = 0; first < WIDTH; first += CHUNK) {
      float sums[N / 8][TW_BLOCKS][4];
#pragma unroll
      for (int n = 0; n < N / 8; n++)
#pragma unroll
        for (int m = 0; m < TW_BLOCKS; m++)
#pragma unroll
          for (int f = 0; f < 4; f++) sums[n][m][f] = 0.0f;
#pragma unroll UNROLL
      for (int d = first; d < first + CHUNK && d < WIDTH; d += 16) {
        unsigned big[TW_BLOCKS][4], small[TW_BLOCKS][4];
#pragma unroll
        for (int m = 0; m < TW_BLOCKS; m++) {
          load_matrices(big[m], a_row + m * 16 * STRIDE + d);
          load_matrices(small[m], a_row + m * 16 * STRIDE + d + 4);
        }
#pragma unroll
        for (int n = 0; n < N / 8; n++) {
          unsigned x[4];
          load_matrices(x, b_row + n * 8 * STRIDE + d);
#pragma unroll
          for (int m = 0; m < TW_BLOCKS; m++) add_product(cross[n], m, small[m], x[0], x[1]);
#pragma unroll
          for (int m = 0; m < TW_BLOCKS; m++) add_product(sums[n], m, big[m], x[0], x[1]);
#pragma unroll
          for (int m = 0; m < TW_BLOCKS; m++) add_product(cross[n], m, big[m], x[2], x[3]);
        }
      }
#pragma unroll
      for (int r = 0; r < ROWS; r++)
#pragma unroll
        for (int c = 0; c < N / LANES; c++) {
          float sum = sums[c / 2][r / 2][r % 2 * 2 + c % 2];
          scores[r][c] = first == 0 ? sum : scores[r][c] + sum;
        }
    }
    float a_back[ROWS];
#pragma unroll
    for (int r = 0; r < ROWS; r++) a_back[r] = a[row_of(r) * STRIDE + WIDTH];
#pragma unroll
    for (int c = 0; c < N / LANES; c++) {
      float b_back = b[column_of(c) * STRIDE + WIDTH] * scale;
#pragma unroll
      for (int r = 0; r < ROWS; r++) {
        float sum = scores[r][c] + cross[c / 2][r / 2][r % 2 * 2 + c % 2];
        scores[r][c] = SCALED ? multiply(sum, a_back[r] * b_back) : sum * (a_back[r] * b_back);
      }
    }
  }

  // sums = sums * decay + tile columns, a row of sums in a unit of its own. What a thread holds of a tile is just what
  // it has to hand to the tensor core as the left operand. The rows' factors of ``columns`` join the tile, and a row of
  // it is scaled to halves by its largest number so far: by that of ``columns`` alone where the tile's are at most 1.
  template <int N, int WIDTH, int STRIDE, bool ARE_PROBS>
  static TW_DEVICE void tile_by_columns(float (&sums)[ROWS][WIDTH / LANES], const float (&decay)[ROWS],
                                        const float (&tile)[ROWS][N / LANES], const float* columns,
                                        float (&unit)[ROWS], float*) {
    static_assert(WIDTH % 32 == 0 && N % 16 == 0, "columns come in groups of 32, rows of 16");
    float back[N / LANES], scaled[ROWS][N / LANES], rescale[ROWS], largest_back = 0.0f, last_of_probs = unit[0];
#pragma unroll
    for (int c = 0; c < N / LANES; c++) {
      back[c] = columns[column_of(c) * STRIDE + WIDTH];
      largest_back = fmaxf(largest_back, back[c]);
    }
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
      float largest = largest_back, there;
#pragma unroll
      for (int c = 0; c < N / LANES; c++) {
        scaled[r][c] = ARE_PROBS ? tile[r][c] : tile[r][c] * back[c];
        if (!ARE_PROBS) largest = fmaxf(c == 0 ? 0.0f : largest, fabsf(scaled[r][c]));
      }
#pragma unroll
      for (int mask = 1; mask < LANES; mask *= 2) largest = fmaxf(largest, shuffle_xor(largest, mask));
      float last = ARE_PROBS ? last_of_probs : unit[r];  // the same for all rows
      scale_to_halves(fmaxf(largest, last * 0x1p14f), there, unit[r]);
      rescale[r] = decay[r] * (last * there);
#pragma unroll
      for (int c = 0; c < N / LANES; c++) scaled[r][c] *= ARE_PROBS ? back[c] * there : there;
    }

    unsigned big[N / 16][TW_BLOCKS][4], small[N / 16][TW_BLOCKS][4];
#pragma unroll
    for (int n = 0; n < N / 16; n++)
#pragma unroll
      for (int m = 0; m < TW_BLOCKS; m++)
#pragma unroll
        for (int f = 0; f < 4; f++) {
          int r = 2 * m + f % 2, c = 4 * n + f / 2 * 2;
          split(scaled[r][c], scaled[r][c + 1], big[n][m][f], small[n][m][f]);
        }
    const float* row = columns + lane() % 16 * STRIDE + lane() / 16 * 4;  // two of rows, big and small
    // A product is added five products' time after it began: what is next to it belongs to another sum. So what is
    // small has sums of its own, which cuts it less, too; and where registers are few, and the compiler makes one block
    // of columns after the other, its two kinds have.
    constexpr int ABREAST = WIDTH > 64 ? 1 : 2, PARTS = WIDTH > 64 ? 3 : 2;
#pragma unroll
    for (int first = 0; first < WIDTH / 8; first += ABREAST) {
      float part[ABREAST][PARTS][TW_BLOCKS][4];
#pragma unroll
      for (int e = 0; e < ABREAST; e++)
#pragma unroll
        for (int p = 0; p < PARTS; p++)
#pragma unroll
          for (int m = 0; m < TW_BLOCKS; m++)
#pragma unroll
            for (int f = 0; f < 4; f++) part[e][p][m][f] = 0.0f;
#pragma unroll
      for (int n = 0; n < N / 16; n++) {
        unsigned x[ABREAST][4];
#pragma unroll
        for (int e = 0; e < ABREAST; e++)
          load_matrices_transposed(x[e], row + n * 16 * STRIDE + (first + e) * 8);
#pragma unroll
        for (int e = 0; e < ABREAST; e++)
#pragma unroll
          for (int m = 0; m < TW_BLOCKS; m++) add_product(part[e][0], m, small[n][m], x[e][0], x[e][1]);
#pragma unroll
        for (int e = 0; e < ABREAST; e++)
#pragma unroll
          for (int m = 0; m < TW_BLOCKS; m++) add_product(part[e][1], m, big[n][m], x[e][0], x[e][1]);
#pragma unroll
        for (int e = 0; e < ABREAST; e++)
#pragma unroll
          for (int m = 0; m < TW_BLOCKS; m++) add_product(part[e][2 % PARTS], m, big[n][m], x[e][2], x[e][3]);
      }
#pragma unroll
      for (int r = 0; r < ROWS; r++)
#pragma unroll
        for (int e = 0; e < ABREAST; e++)
#pragma unroll
          for (int h = 0; h < 2; h++) {
            float& sum = sums[r][2 * (first + e) + h];
            const int m = r / 2, f = r % 2 * 2 + h;
            float low = PARTS == 3 ? part[e][0][m][f] + part[e][2 % PARTS][m][f] : part[e][0][m][f];
            sum = sum * rescale[r] + (low + part[e][1][m][f]);
          }
    }
  }

  // What a thread holds of a tile, times its row's factor, to where ``to`` has it transposed: a tile of N rows in
  // shared memory, of which every warp fills columns of its own. Splitting deals 16 columns to two blocks of 8: they
  // stand so that the first block gets the first 8 rows.
  template <int N, int STRIDE>
  static TW_DEVICE void store_transposed(float* to, const float (&tile)[ROWS][N / LANES], const float* factors,
                                         int apart) {
    int own = lane() / 8 * 4 + lane() / 4 % 2;  // of row g; row g + 8 is 2 behind
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
      float factor = factors[row_of(r) * apart];
#pragma unroll
      for (int c = 0; c < N / LANES; c++)
        to[column_of(c) * STRIDE + r / 2 * 16 + r % 2 * 2 + own] = tile[r][c] * factor;
    }
  }

  // sums = a b for 16 rows of a, of its columns [from, to) by 16, and every APART-th group of 16 columns of b from
  // ``group`` on; for the last of all there are where there is none. A thread gets 4 neighbours of a group in row g,
  // then in row g + 8.
  template <int GROUPS, int APART, int WIDTH, int A_STRIDE, int B_STRIDE>
  static TW_DEVICE void rows_by_columns(float (&sums)[GROUPS][4 * SUM_ROWS], const float* a, const float* b, int from,
                                        int to, int group) {
    constexpr int PARTS = GROUPS == 1 ? 3 : 2;
    float part[2 * GROUPS][PARTS][4];
#pragma unroll
    for (int e = 0; e < 2 * GROUPS; e++)
#pragma unroll
      for (int p = 0; p < PARTS; p++)
#pragma unroll
        for (int f = 0; f < 4; f++) part[e][p][f] = 0.0f;
    const float* a_row = a + lane() % 16 * A_STRIDE + lane() / 16 * 8;  // two of rows, of columns
    const float* b_row[GROUPS];  // two of rows, big and small
#pragma unroll
    for (int i = 0; i < GROUPS; i++)
      b_row[i] = b + lane() % 16 * B_STRIDE + least(group + i * APART, WIDTH / 16 - 1) * 16 + lane() / 16 * 4;
#pragma unroll 4
    for (int n = from; n < to; n += 16) {
      unsigned big[4], small[4], x[2 * GROUPS][4];
      load_matrices(big, a_row + n);
      load_matrices(small, a_row + n + 4);
#pragma unroll
      for (int e = 0; e < 2 * GROUPS; e++)
        load_matrices_transposed(x[e], b_row[e / 2] + n * B_STRIDE + e % 2 * 8);
#pragma unroll
      for (int p = 0; p < 3; p++)
#pragma unroll
        for (int e = 0; e < 2 * GROUPS; e++) {
          float(&sum)[4] = part[e][p % PARTS];
          multiply_halves(sum[0], sum[1], sum[2], sum[3], p == 0 ? small : big, x[e][p / 2 * 2], x[e][p / 2 * 2 + 1]);
        }
    }
#pragma unroll
    for (int e = 0; e < 2 * GROUPS; e++)
#pragma unroll
      for (int f = 0; f < 4; f++) {
        float low = PARTS == 3 ? part[e][0][f] + part[e][2 % PARTS][f] : part[e][0][f];
        sums[e / 2][f / 2 * 4 + e % 2 * 2 + f % 2] = low + part[e][1][f];
      }
  }
};
