/* What MLIR's lowered memref.copy calls: copies a strided memref of any rank, element by element. */
#include <stdint.h>
#include <string.h>

typedef struct { int64_t rank; void *descriptor; } Unranked;
typedef struct { char *allocated; char *aligned; int64_t offset; int64_t sizes_and_strides[]; } Ranked;

static void copy(int64_t bytes, int64_t rank, const int64_t *sizes, const char *from, const int64_t *steps_from, char *to,
                 const int64_t *steps_to) {
  if (rank == 0) {
    memcpy(to, from, bytes);
    return;
  }
  for (int64_t i = 0; i < sizes[0]; i++)
    copy(bytes, rank - 1, sizes + 1, from + i * steps_from[0] * bytes, steps_from + 1, to + i * steps_to[0] * bytes,
         steps_to + 1);
}

void memrefCopy(int64_t bytes, Unranked *source, Unranked *target) {
  const Ranked *from = source->descriptor, *to = target->descriptor;
  int64_t rank = source->rank;
  const int64_t *sizes = from->sizes_and_strides;
  copy(bytes, rank, sizes, from->aligned + from->offset * bytes, sizes + rank, to->aligned + to->offset * bytes,
       to->sizes_and_strides + rank);
}
