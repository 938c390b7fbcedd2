"""Which tile sizes a kernel runs with. Nothing here tunes by itself: `tilewise tune` writes tables."""
