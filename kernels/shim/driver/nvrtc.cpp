// NVRTC for the software driver. Bonfire's own programs are part of that driver, which finds their kernels by name, so
// the image of such a program is its source. Others are compiled with g++ into a library, which their image names.
//
// The libraries stay in the folder `compiled` beside this one, for this and for other processes: compiling takes much
// longer than running. They are for the processor of this machine.
#include <dlfcn.h>
#include <fcntl.h>
#include <spawn.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdint>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <map>
#include <regex>
#include <set>
#include <sstream>
#include <string>
#include <vector>

#define NVRTC extern "C" __attribute__((visibility("default"))) int

extern char **environ;

namespace {

enum { SUCCESS = 0, INVALID_INPUT = 3, INVALID_PROGRAM = 4, INVALID_OPTION = 5, COMPILATION = 6 };

struct Program {
    std::string source, image, log;
};

// Only Bonfire's programs include this header, whose contents the driver has in another form.
constexpr const char *OWN = "BONFIRE_PTX_CUH";

// What only a kernel contains whose threads wait for each other.
constexpr const char *WAITS[] = {"__syncthreads", "_sync(", "__syncwarp"};

constexpr const char *FLAGS[] = {
    "-std=c++17", "-O2", "-march=native", "-fno-math-errno", "-fno-strict-aliasing", "-fno-exceptions", "-fpermissive",
    "-w", "-fmax-errors=20", "-fPIC", "-fvisibility=hidden", "-shared", "-include", "cuda_runtime.h", "-x", "c++",
};

// The folder of this library, which contains `include` and `compiled`. A program may find the library by a link, such
// as those of gpu-check.
std::string folder() {
    Dl_info found{};
    dladdr(reinterpret_cast<void *>(&folder), &found);
    std::error_code missing;
    return std::filesystem::canonical(found.dli_fname ? found.dli_fname : "", missing).parent_path();
}

// cubecl numbers temporary variables throughout a process. Here they are numbered throughout the program, so that its
// text does not depend on which programs were generated before.
std::string renumbered(const std::string &source) {
    constexpr char PREFIX[] = "_tmp_";
    constexpr size_t LENGTH = sizeof PREFIX - 1;
    std::map<std::string, size_t> numbers;
    std::string text;
    size_t from = 0;
    for (size_t at; (at = source.find(PREFIX, from)) != std::string::npos;) {
        size_t first = at + LENGTH, last = first;
        while (last < source.size() && isdigit(source[last])) ++last;
        std::string number = source.substr(first, last - first);
        text += source.substr(from, first - from);
        if (!number.empty()) text += std::to_string(numbers.emplace(number, numbers.size()).first->second);
        from = last;
    }
    return text + source.substr(from);
}

uint64_t hash(const std::string &text, uint64_t value = 0xcbf29ce484222325) {
    for (unsigned char byte : text) value = (value ^ byte) * 0x100000001b3;
    return value;
}

// Whether a line of a kernel declares a variable without a value, or a place in the dynamic shared memory.
bool declares(const std::string &line) {
    if (line.find("dynamic_shared_mem[") != std::string::npos) return true;
    return line.find(' ') != std::string::npos && line.ends_with(';') && line.find_first_of("=(") == std::string::npos;
}

// The name of a program's library. cubecl writes the types before a kernel, and declarations in it, in any order, so
// the order of those lines does not matter here.
std::string key(const std::string &text) {
    uint64_t ordered = hash(""), unordered = 0;
    bool in_kernel = false;
    std::istringstream lines(text);
    for (std::string line; std::getline(lines, line);) {
        in_kernel |= line.find("__global__") != std::string::npos;
        if (line.starts_with("//")) continue;
        if (in_kernel && !declares(line)) ordered = hash(line + '\n', ordered);
        else unordered += hash(line);
    }
    char name[40];
    snprintf(name, sizeof name, "%016llx%016llx", (unsigned long long)(ordered), (unsigned long long)(unordered));
    return name;
}

// The text as g++ compiles it, with an entry for each kernel.
std::string for_host(const std::string &text) {
    static const auto *dynamic = new std::regex(
        R"(extern\s+__shared__\s+(?:__align__\s*\([^)]*\)\s*)?(\w[\w ]*?)\s+(\w+)\s*\[\s*\]\s*;)");
    static const auto *kernel = new std::regex(R"(__global__\s+void\s+(?:__\w+__\s*\([^)]*\)\s*)*(\w+)\s*\()");
    bool waits = false;
    for (const char *word : WAITS) waits |= text.find(word) != std::string::npos;
    std::string entries = "\n";
    for (std::sregex_iterator found(text.begin(), text.end(), *kernel), end; found != end; ++found) {
        entries += "SHIM_ENTRY(" + (*found)[1].str() + ", " + (waits ? "true" : "false") + ")\n";
    }
    return std::regex_replace(text, *dynamic, "$1 *$2 = static_cast<$1 *>(::compiled::dynamic_shared());") + entries;
}

std::string contents(const std::string &path) {
    std::ifstream file(path);
    return {std::istreambuf_iterator<char>(file), {}};
}

// Runs g++, with its messages in the file `log`. Returns 0 if it has compiled the program, -1 if it could not run, or
// else its exit status.
int run_compiler(const std::string &source, const std::string &library, const std::string &log) {
    std::string include = "-I" + folder() + "/include";
    std::vector<const char *> arguments = {"g++"};
    arguments.insert(arguments.end(), std::begin(FLAGS), std::end(FLAGS));
    for (const char *last : {include.c_str(), source.c_str(), "-o", library.c_str(), "-lm"}) arguments.push_back(last);
    arguments.push_back(nullptr);
    posix_spawn_file_actions_t files;
    posix_spawn_file_actions_init(&files);
    posix_spawn_file_actions_addopen(&files, 1, log.c_str(), O_WRONLY | O_CREAT | O_TRUNC, 0600);
    posix_spawn_file_actions_adddup2(&files, 1, 2);
    pid_t child = 0;
    int status = posix_spawnp(&child, "g++", &files, nullptr, const_cast<char **>(arguments.data()), environ);
    posix_spawn_file_actions_destroy(&files);
    if (status) return -1;
    while (waitpid(child, &status, 0) < 0) {
        if (errno != EINTR) return -1;
    }
    return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

// Compiles a program, unless a process has compiled it before. Returns the path of its library, or else an empty one
// and the log.
std::string compile(const std::string &source, std::string &log) {
    std::string text = renumbered(source), all = folder() + "/compiled";
    mkdir(all.c_str(), 0700);
    std::string base = all + "/" + key(text), library = base + ".so", failure = base + ".log", file = base + ".cu";
    // Locked while a thread or a process compiles.
    int lock = open(file.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    if (lock < 0) {
        log = "the software driver cannot write to " + all + ": " + strerror(errno);
        return "";
    }
    while (flock(lock, LOCK_EX) && errno == EINTR) {}
    bool compiled = !access(library.c_str(), R_OK), failed = !access(failure.c_str(), R_OK);
    if (!compiled && !failed) {
        std::ofstream(file, std::ios::trunc) << for_host(text);
        // Renamed once complete: a process may be killed meanwhile.
        std::string new_library = library + ".new", new_log = failure + ".new";
        int status = run_compiler(file, new_library, new_log);
        compiled = status == 0 && !rename(new_library.c_str(), library.c_str());
        if (compiled) unlink(new_log.c_str());
        failed = status > 0 && status != 127 && !rename(new_log.c_str(), failure.c_str());
    }
    close(lock);
    if (compiled) return library;
    log = failed ? contents(failure) : "the software driver compiles kernels with g++, which could not run";
    return "";
}

int copy(const std::string &text, char *to) {
    memcpy(to, text.c_str(), text.size() + 1);
    return SUCCESS;
}

int size(const std::string &text, size_t *bytes) {
    *bytes = text.size() + 1;
    return SUCCESS;
}

Program *program_of(void *handle) { return static_cast<Program *>(handle); }

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
        case INVALID_OPTION: return "NVRTC_ERROR_INVALID_OPTION";
        case COMPILATION: return "NVRTC_ERROR_COMPILATION";
        default: return "NVRTC_ERROR unknown";
    }
}

NVRTC nvrtcCreateProgram(void **program, const char *source, const char *, int, const char *const *,
                         const char *const *) {
    if (!source) return INVALID_INPUT;
    *program = new Program{source, "", ""};
    return SUCCESS;
}

NVRTC nvrtcCompileProgram(void *handle, int count, const char *const *options) {
    Program *program = program_of(handle);
    if (!program) return INVALID_PROGRAM;
    if (const char *most = getenv("SHIM_NVRTC")) {
        int architecture = 0;
        for (int i = 0; i < count; ++i) sscanf(options[i], "--gpu-architecture=sm_%d", &architecture);
        if (architecture > atoi(most)) return INVALID_OPTION;
    }
    if (program->source.find(OWN) != std::string::npos) {
        program->image = program->source;
        return SUCCESS;
    }
    std::string library = compile(program->source, program->log);
    if (library.empty()) return COMPILATION;
    program->image = "library " + library;
    return SUCCESS;
}

NVRTC nvrtcDestroyProgram(void **program) {
    delete program_of(*program);
    *program = nullptr;
    return SUCCESS;
}

NVRTC nvrtcGetPTXSize(void *program, size_t *bytes) {
    return program ? size(program_of(program)->image, bytes) : INVALID_PROGRAM;
}
NVRTC nvrtcGetPTX(void *program, char *to) { return program ? copy(program_of(program)->image, to) : INVALID_PROGRAM; }
NVRTC nvrtcGetCUBINSize(void *program, size_t *bytes) { return nvrtcGetPTXSize(program, bytes); }
NVRTC nvrtcGetCUBIN(void *program, char *to) { return nvrtcGetPTX(program, to); }

NVRTC nvrtcGetProgramLogSize(void *program, size_t *bytes) {
    return program ? size(program_of(program)->log, bytes) : INVALID_PROGRAM;
}
NVRTC nvrtcGetProgramLog(void *program, char *to) {
    return program ? copy(program_of(program)->log, to) : INVALID_PROGRAM;
}
