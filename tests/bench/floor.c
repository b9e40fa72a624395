/* What the bare machine can do: spawn a command COUNT times, PARALLEL at a time, and wait for each.
 *
 *   cc -O2 -o floor floor.c && ./floor COUNT PARALLEL COMMAND [ARG ...]
 *
 * Prints one JSON object: p50_s (of one command, from spawn to wait; only meaningful for PARALLEL 1) and rate (commands a second).
 */
#define _GNU_SOURCE
#include <spawn.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

extern char **environ;

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec / 1e9;
}

static int ascending(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

int main(int argc, char **argv) {
    if (argc < 4 || atoi(argv[1]) < 1 || atoi(argv[2]) < 1) {
        fprintf(stderr, "usage: floor COUNT PARALLEL COMMAND [ARG ...]\n");
        return 2;
    }
    int count = atoi(argv[1]), parallel = atoi(argv[2]), started = 0, ended = 0;
    double *laps = calloc((size_t)count, sizeof *laps), begin = now(), lap_begin = begin;
    if (laps == NULL) return 1;
    while (ended < count) {
        for (; started < count && started - ended < parallel; started++) {
            pid_t pid;
            lap_begin = now();
            if (posix_spawnp(&pid, argv[3], NULL, NULL, argv + 3, environ) != 0) {
                perror("posix_spawnp");
                return 1;
            }
        }
        int status;
        if (wait(&status) < 0 || status != 0) {
            fprintf(stderr, "the command failed\n");
            return 1;
        }
        laps[ended++] = now() - lap_begin;
    }
    double total = now() - begin;
    qsort(laps, (size_t)count, sizeof *laps, ascending);
    printf("{\"p50_s\": %.9f, \"rate\": %.3f}\n", laps[count / 2], count / total);
    return 0;
}
