// A kernel that does nothing, to time what surrounds one.
BENCH(THREADS) {}
