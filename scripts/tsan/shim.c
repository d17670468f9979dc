// Linked into programs that run under the thread sanitizer (scripts/sanitize), with the linker's --wrap.
#define _GNU_SOURCE
#include <stdarg.h>
#include <stddef.h>
#include <sys/mman.h>
#include <sys/stat.h>

// The sanitizer ignores fences. Arc::drop counts a reference out with release, and the last owner passes an acquire
// fence: here it acquires with the count. Nothing else in Bonfire subtracts with release alone.
unsigned long __real___tsan_atomic64_fetch_sub(volatile unsigned long *at, unsigned long value, int order);

unsigned long __wrap___tsan_atomic64_fetch_sub(volatile unsigned long *at, unsigned long value, int order) {
  return __real___tsan_atomic64_fetch_sub(at, value, order == __ATOMIC_RELEASE ? __ATOMIC_ACQ_REL : order);
}

// Ranks that are threads map their segment once each, and the sanitizer knows memory by its address. So all mappings of
// a segment in a process are one here.
void *__real_mmap64(void *at, size_t length, int access, int flags, int file, off_t offset);
int __real_munmap(void *at, size_t length);

static struct {
  dev_t device;
  ino_t inode;
  char *base;
  size_t length;
  unsigned users;
} mappings[1024];
static char locked;

static void lock(void) {
  while (__atomic_test_and_set(&locked, __ATOMIC_ACQUIRE)) {
  }
}

static void unlock(void) { __atomic_clear(&locked, __ATOMIC_RELEASE); }

void *__wrap_mmap64(void *at, size_t length, int access, int flags, int file, off_t offset) {
  struct stat of;
  if (!(flags & MAP_SHARED) || file < 0 || offset != 0 || fstat(file, &of)) {
    return __real_mmap64(at, length, access, flags, file, offset);
  }
  int unused = -1;
  void *base = NULL;
  lock();
  for (int i = 0; i < 1024 && !base; i++) {
    if (!mappings[i].users) {
      unused = i;
    } else if (mappings[i].device == of.st_dev && mappings[i].inode == of.st_ino) {
      if (at == NULL && mappings[i].length == length) {
        mappings[i].users++;
        base = mappings[i].base;
      } else if (at == mappings[i].base && mappings[i].users > 1) {
        // Its beginning is mapped once more to populate it, which the first user has done.
        base = at;
      }
    }
  }
  if (!base) {
    base = __real_mmap64(at, length, access, flags, file, offset);
    if (at == NULL && base != MAP_FAILED && unused >= 0) {
      mappings[unused].device = of.st_dev;
      mappings[unused].inode = of.st_ino;
      mappings[unused].base = base;
      mappings[unused].length = length;
      mappings[unused].users = 1;
    }
  }
  unlock();
  return base;
}

int __wrap_munmap(void *at, size_t length) {
  int last = 1;
  lock();
  for (int i = 0; i < 1024; i++) {
    if (mappings[i].users && mappings[i].base == at && mappings[i].length == length) {
      last = --mappings[i].users == 0;
      break;
    }
  }
  int result = last ? __real_munmap(at, length) : 0;
  unlock();
  return result;
}

// rustix 1.1 on libc asks for a fixed address with the flag of mmap, which mremap refuses.
void *__real_mremap(void *at, size_t length, size_t new_length, int flags, ...);

void *__wrap_mremap(void *at, size_t length, size_t new_length, int flags, ...) {
  va_list more;
  va_start(more, flags);
  void *target = va_arg(more, void *);
  va_end(more);
  flags = flags & MAP_FIXED ? (flags & ~MAP_FIXED) | MREMAP_FIXED : flags;
  return __real_mremap(at, length, new_length, flags, target);
}
