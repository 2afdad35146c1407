/* `play` of in_python.py in C: the Python is the statement of the rule; the same numbers are added and compared in the same
 * order, and the digits must be the same (tests/unit/model/training/turns).  Change both or neither.
 */
#include <math.h>
#include <stdlib.h>

enum { DONE = 0, NO_MEMORY = 1 };

/* The slot that is free first is free at `end` now; the heap keeps its order. */
static void replace_first(double *free_at, int slots, double end)
{
    int at = 0;
    for (;;) {
        int child = 2 * at + 1;
        if (child >= slots)
            break;
        if (child + 1 < slots && free_at[child + 1] < free_at[child])
            child++;
        if (free_at[child] >= end)
            break;
        free_at[at] = free_at[child];
        at = child;
    }
    free_at[at] = end;
}

int play(const double *cycles, int count, int heads, int abreast, int query_heads, double turn, int slots, double *found)
{
    double *free_at = calloc(slots, sizeof *free_at);
    double *before = malloc(sizeof *before * abreast * query_heads);
    double waited = 0.0, last = 0.0;
    if (!free_at || !before) {
        free(free_at), free(before);
        return NO_MEMORY;
    }
    for (int first = 0; first < heads; first += abreast) {
        int together = heads - first < abreast ? heads - first : abreast;
        for (int i = 0; i < together * query_heads; i++)
            before[i] = -INFINITY;
        for (int tile = 0; tile < count; tile++) {
            double each = cycles[tile] / query_heads;
            for (int head = 0; head < together; head++) {
                double start = free_at[0], end = start, *begun = before + head * query_heads;
                if (turn != 0.0) {
                    for (int q = 0; q < query_heads; q++) {
                        double own_turn = begun[q] + turn;
                        begun[q] = own_turn > end ? own_turn : end;
                        end = begun[q] + each;
                    }
                    waited += end - start - cycles[tile];
                } else {
                    end = start + cycles[tile];
                }
                replace_first(free_at, slots, end);
            }
        }
    }
    for (int slot = 0; slot < slots; slot++)
        if (free_at[slot] > last)
            last = free_at[slot];
    found[0] = last, found[1] = waited;
    free(free_at), free(before);
    return DONE;
}
