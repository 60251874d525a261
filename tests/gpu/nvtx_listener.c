// A listener to NVTX ranges: NVTX loads it where NVTX_INJECTION64_PATH names it, and it writes the name of every range
// that is entered to the file that NVTX_LISTENER_OUT names, one a line. It stands in for Nsight Systems in a test.
// The layouts are those of NVTX 3 (nvtxTypes.h, nvtxCore2Types), of which only what is used is declared.

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef void (*Function)(void);
typedef int (*GetTable)(int module, Function*** table, unsigned* size);

typedef struct {
  size_t struct_size;
  GetTable get_table;
} Callbacks;

typedef struct {
  uint16_t version, size;
  uint32_t category;
  int32_t color_type;
  uint32_t color;
  int32_t payload_type, reserved;
  uint64_t payload;
  int32_t message_type;
  const void* message;
} Attributes;

enum { kCallbacks = 1 };                                                   // export tables
enum { kCore = 1, kCore2 = 5 };                                            // modules of functions
enum { kStartEx = 4, kStart = 5, kPushEx = 8, kPush = 9 };                 // functions of the first
enum { kDomainStart = 2, kDomainPush = 4, kRegister = 10, kDomain = 12 };  // and of the second
enum { kText = 1, kRegistered = 3 };                                       // types of messages

static FILE* out = NULL;

static void Write(const char* name) {
  if (!out || !name) return;
  fprintf(out, "%s\n", name);
  fflush(out);
}

static void WriteMessage(const Attributes* a) {
  if (a && (a->message_type == kText || a->message_type == kRegistered)) Write(a->message);
}

static int Push(const char* name) {
  Write(name);
  return 0;
}

static int PushEx(const Attributes* a) {
  WriteMessage(a);
  return 0;
}

static uint64_t Start(const char* name) {
  Write(name);
  return 1;
}

static uint64_t StartEx(const Attributes* a) {
  WriteMessage(a);
  return 1;
}

static int DomainPush(void* domain, const Attributes* a) {
  (void)domain;
  return PushEx(a);
}

static uint64_t DomainStart(void* domain, const Attributes* a) {
  (void)domain;
  return StartEx(a);
}

// A handle of a string is the string itself.
static void* Register(void* domain, const char* text) {
  (void)domain;
  return strdup(text);
}

static void* Domain(const char* name) { return strdup(name); }

static void Set(Function** table, unsigned size, unsigned index, Function function) {
  if (index < size && table[index]) *table[index] = function;
}

__attribute__((visibility("default"))) int InitializeInjectionNvtx2(const void* (*tables)(uint32_t)) {
  const char* path = getenv("NVTX_LISTENER_OUT");
  const Callbacks* callbacks = tables(kCallbacks);
  if (!path || !callbacks || !(out = fopen(path, "a"))) return 0;
  Function** table = NULL;
  unsigned size = 0;
  if (callbacks->get_table(kCore, &table, &size)) {
    Set(table, size, kStartEx, (Function)StartEx);
    Set(table, size, kStart, (Function)Start);
    Set(table, size, kPushEx, (Function)PushEx);
    Set(table, size, kPush, (Function)Push);
  }
  if (callbacks->get_table(kCore2, &table, &size)) {
    Set(table, size, kDomainStart, (Function)DomainStart);
    Set(table, size, kDomainPush, (Function)DomainPush);
    Set(table, size, kRegister, (Function)Register);
    Set(table, size, kDomain, (Function)Domain);
  }
  return 1;
}
