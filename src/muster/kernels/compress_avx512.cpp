#define MUSTER_COMPRESS kAvx512Compress
#include "muster/kernels/compress_kernels.inc"
