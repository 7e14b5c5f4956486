/* What `ldtilecfg` reads, said in full.
 *
 * The instruction takes 64 bytes: a palette, and the rows and columns of eight tiles. GCC before 14 declares the operand
 * of its `_tile_loadconfig` as a pointer to 8 bytes, so it may drop the stores to the other 56 as dead; the CPU then
 * reads what lay on the stack and faults, in llama.cpp at the first matrix product. Force-included before ggml's C++
 * (llama_cpp.cmake), this puts a function of the same name in front of the compiler's that names all 64.
 *
 * Without AMX in the build there is nothing here; nor for Clang, which has it right. Later GCCs lose nothing by it.
 */
#pragma once

#if defined(__AMX_TILE__) && defined(__GNUC__) && !defined(__clang__)

#include <immintrin.h>

static inline __attribute__((always_inline)) void headrace_tile_loadconfig(const void *config) {
    __asm__ volatile("ldtilecfg %0" : : "m"(*(const char(*)[64])config));
}

#undef _tile_loadconfig
#define _tile_loadconfig headrace_tile_loadconfig

#endif
