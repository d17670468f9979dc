// NVRTC that compiles nothing: a program's image is its source. The software driver finds its own kernels by name.
#include <cstring>
#include <string>

#define NVRTC extern "C" __attribute__((visibility("default"))) int

namespace {
enum { SUCCESS = 0, INVALID_INPUT = 3, INVALID_PROGRAM = 4 };

int size(void *program, size_t *bytes) {
    if (!program) return INVALID_PROGRAM;
    *bytes = static_cast<std::string *>(program)->size() + 1;
    return SUCCESS;
}

int image(void *program, char *to) {
    if (!program) return INVALID_PROGRAM;
    auto *source = static_cast<std::string *>(program);
    memcpy(to, source->c_str(), source->size() + 1);
    return SUCCESS;
}
}  // namespace

NVRTC nvrtcVersion(int *major, int *minor) {
    *major = 13;
    *minor = 0;
    return SUCCESS;
}

extern "C" __attribute__((visibility("default"))) const char *nvrtcGetErrorString(int code) {
    switch (code) {
        case SUCCESS: return "NVRTC_SUCCESS";
        case INVALID_INPUT: return "NVRTC_ERROR_INVALID_INPUT";
        case INVALID_PROGRAM: return "NVRTC_ERROR_INVALID_PROGRAM";
        default: return "NVRTC_ERROR unknown";
    }
}

NVRTC nvrtcCreateProgram(void **program, const char *source, const char *, int, const char *const *,
                         const char *const *) {
    if (!source) return INVALID_INPUT;
    *program = new std::string(source);
    return SUCCESS;
}

NVRTC nvrtcCompileProgram(void *program, int, const char *const *) { return program ? SUCCESS : INVALID_PROGRAM; }

NVRTC nvrtcDestroyProgram(void **program) {
    delete static_cast<std::string *>(*program);
    *program = nullptr;
    return SUCCESS;
}

NVRTC nvrtcGetPTXSize(void *program, size_t *bytes) { return size(program, bytes); }
NVRTC nvrtcGetPTX(void *program, char *to) { return image(program, to); }
NVRTC nvrtcGetCUBINSize(void *program, size_t *bytes) { return size(program, bytes); }
NVRTC nvrtcGetCUBIN(void *program, char *to) { return image(program, to); }

NVRTC nvrtcGetProgramLogSize(void *program, size_t *bytes) {
    *bytes = 1;
    return program ? SUCCESS : INVALID_PROGRAM;
}
NVRTC nvrtcGetProgramLog(void *program, char *to) {
    *to = 0;
    return program ? SUCCESS : INVALID_PROGRAM;
}
