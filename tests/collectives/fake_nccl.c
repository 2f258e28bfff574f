/* A libnccl that tells a listener of every call, with its arguments as the C ABI brought them.
 *
 * It is compiled against NVIDIA's own nccl.h, so that its signatures, types and codes are the real ones.
 * -DVERSION=… is the version it says it has; -DWITHOUT_SEND leaves ncclSend out.
 */
#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include <nccl.h>

#ifndef VERSION
#define VERSION NCCL_VERSION_CODE
#endif

typedef int (*Listener)(const char *line);
static Listener listener;
static _Thread_local char line[1024];

void fake_listen(Listener to) { listener = to; }

static ncclResult_t say(const char *format, ...) {
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(line, sizeof line, format, arguments);
  va_end(arguments);
  return listener ? (ncclResult_t)listener(line) : ncclSuccess;
}

static const char *name_of(ncclDataType_t type) {
  switch (type) {
  case ncclInt8: return "int8";
  case ncclUint8: return "uint8";
  case ncclInt32: return "int32";
  case ncclUint32: return "uint32";
  case ncclInt64: return "int64";
  case ncclUint64: return "uint64";
  case ncclFloat16: return "float16";
  case ncclFloat32: return "float32";
  case ncclFloat64: return "float64";
  case ncclBfloat16: return "bfloat16";
  case ncclFloat8e4m3: return "float8_e4m3fn";
  case ncclFloat8e5m2: return "float8_e5m2";
  default: return "?";
  }
}

static const char *name_of_op(ncclRedOp_t op) {
  switch (op) {
  case ncclSum: return "sum";
  case ncclMax: return "max";
  case ncclMin: return "min";
  default: return "?";
  }
}

#define P "%" PRIuPTR
#define A(pointer) ((uintptr_t)(pointer))

ncclResult_t ncclGetVersion(int *version) {
  *version = VERSION;
  return ncclSuccess;
}

ncclResult_t ncclGetUniqueId(ncclUniqueId *id) {
  for (int i = 0; i < NCCL_UNIQUE_ID_BYTES; i++) id->internal[i] = (char)(3 * i); /* the first byte is 0 */
  return say("ncclGetUniqueId");
}

ncclResult_t ncclCommInitRank(ncclComm_t *comm, int nranks, ncclUniqueId id, int rank) {
  char hex[2 * NCCL_UNIQUE_ID_BYTES + 1];
  for (int i = 0; i < NCCL_UNIQUE_ID_BYTES; i++) sprintf(hex + 2 * i, "%02x", (unsigned char)id.internal[i]);
  *comm = (ncclComm_t)(uintptr_t)(0x7fee00001000 + rank); /* more than 32 bits */
  return say("ncclCommInitRank %d %s %d", nranks, hex, rank);
}

ncclResult_t ncclCommDestroy(ncclComm_t comm) { return say("ncclCommDestroy " P, A(comm)); }

ncclResult_t ncclCommAbort(ncclComm_t comm) { return say("ncclCommAbort " P, A(comm)); }

ncclResult_t ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t *error) {
  *error = say("ncclCommGetAsyncError " P, A(comm));
  return ncclSuccess;
}

const char *ncclGetErrorString(ncclResult_t result) {
  return result == ncclInvalidArgument ? "invalid argument" : result == ncclRemoteError ? "remote error" : "?";
}

const char *ncclGetLastError(ncclComm_t comm) { return comm ? "the last words" : ""; }

ncclResult_t ncclAllReduce(const void *from, void *to, size_t count, ncclDataType_t type, ncclRedOp_t op,
                           ncclComm_t comm, cudaStream_t stream) {
  return say("ncclAllReduce " P " " P " %zu %s %s " P " " P, A(from), A(to), count, name_of(type),
             name_of_op(op), A(comm), A(stream));
}

ncclResult_t ncclReduceScatter(const void *from, void *to, size_t count, ncclDataType_t type, ncclRedOp_t op,
                               ncclComm_t comm, cudaStream_t stream) {
  return say("ncclReduceScatter " P " " P " %zu %s %s " P " " P, A(from), A(to), count, name_of(type),
             name_of_op(op), A(comm), A(stream));
}

ncclResult_t ncclReduce(const void *from, void *to, size_t count, ncclDataType_t type, ncclRedOp_t op, int root,
                        ncclComm_t comm, cudaStream_t stream) {
  return say("ncclReduce " P " " P " %zu %s %s %d " P " " P, A(from), A(to), count, name_of(type),
             name_of_op(op), root, A(comm), A(stream));
}

ncclResult_t ncclAllGather(const void *from, void *to, size_t count, ncclDataType_t type, ncclComm_t comm,
                           cudaStream_t stream) {
  return say("ncclAllGather " P " " P " %zu %s " P " " P, A(from), A(to), count, name_of(type), A(comm),
             A(stream));
}

ncclResult_t ncclBroadcast(const void *from, void *to, size_t count, ncclDataType_t type, int root,
                           ncclComm_t comm, cudaStream_t stream) {
  return say("ncclBroadcast " P " " P " %zu %s %d " P " " P, A(from), A(to), count, name_of(type), root,
             A(comm), A(stream));
}

#ifndef WITHOUT_SEND
ncclResult_t ncclSend(const void *from, size_t count, ncclDataType_t type, int peer, ncclComm_t comm,
                      cudaStream_t stream) {
  return say("ncclSend " P " %zu %s %d " P " " P, A(from), count, name_of(type), peer, A(comm), A(stream));
}
#endif

ncclResult_t ncclRecv(void *to, size_t count, ncclDataType_t type, int peer, ncclComm_t comm,
                      cudaStream_t stream) {
  return say("ncclRecv " P " %zu %s %d " P " " P, A(to), count, name_of(type), peer, A(comm), A(stream));
}

ncclResult_t ncclGroupStart(void) { return say("ncclGroupStart"); }

ncclResult_t ncclGroupEnd(void) { return say("ncclGroupEnd"); }
