//! System calls that fail: the chosen ones of this process do, from a moment that the test chooses.
//!
//! A seccomp filter turns the calls into a signal, on all threads that are started after it. The handler counts them
//! and then either makes the call or returns the error instead. This needs no privilege and no other program, and
//! begins after the start-up of the C library, Rust and the test harness, whose calls are not Bonfire's.

use std::arch::global_asm;
use std::io;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU64, Ordering};

/// System calls of one kind that fail.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Failing {
    /// The number of the system call.
    pub call: u32,
    /// Whether only calls from the program's own code count, which are those of rustix. All others go through the C
    /// library, and some are its own, such as those of its allocator.
    pub own: bool,
    /// The error.
    pub errno: i32,
    /// Which call is the first to fail, counted from 1. 0: none.
    pub first: u64,
    /// How many calls later the next one fails; 0: only the first one fails.
    pub step: u64,
}

impl Failing {
    /// Encodes it as a word for [`from_word`](Failing::from_word) in a child.
    pub fn to_word(self) -> String {
        let Failing { call, own, errno, first, step } = self;
        format!("{call}/{}/{errno}/{first}/{step}", u8::from(own))
    }

    /// Decodes the result of [`to_word`](Failing::to_word).
    pub fn from_word(word: &str) -> Option<Failing> {
        let numbers: Vec<u64> = word.split('/').map(str::parse).collect::<Result<_, _>>().ok()?;
        let [call, own, errno, first, step] = numbers[..] else { return None };
        Some(Failing { call: call as u32, own: own == 1, errno: errno as i32, first, step })
    }
}

static ACTIVE: AtomicBool = AtomicBool::new(false);
static ERRNO: AtomicI32 = AtomicI32::new(0);
static FIRST: AtomicU64 = AtomicU64::new(0);
static STEP: AtomicU64 = AtomicU64::new(0);
static SEEN: AtomicU64 = AtomicU64::new(0);

// Makes a system call with the number in `rdi` and the six arguments at `rsi`. The filter lets this one call through.
global_asm!(
    ".globl bonfire_testing_syscall",
    ".globl bonfire_testing_syscall_made",
    "bonfire_testing_syscall:",
    "mov rax, rdi",
    "mov r9, [rsi + 40]",
    "mov r8, [rsi + 32]",
    "mov r10, [rsi + 24]",
    "mov rdx, [rsi + 16]",
    "mov rdi, [rsi]",
    "mov rsi, [rsi + 8]",
    "syscall",
    "bonfire_testing_syscall_made:",
    "ret",
);

unsafe extern "C" {
    fn bonfire_testing_syscall(number: i64, arguments: *const i64) -> i64;
    static bonfire_testing_syscall_made: u8;
    // The linker's names for the begin and the end of the program's code.
    static __executable_start: u8;
    static etext: u8;
}

/// Makes the calls fail from now on, on this thread and on those that it starts. May be called once in a process.
///
/// # Errors
/// If the system does not allow filters.
pub fn fail(failing: Failing) -> io::Result<()> {
    let check = |result: i64| if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) };
    ERRNO.store(failing.errno, Ordering::Relaxed);
    FIRST.store(failing.first, Ordering::Relaxed);
    STEP.store(failing.step, Ordering::Relaxed);
    // SAFETY: a valid action for a signal that no other code uses; the handler only uses what signal handlers may.
    unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        action.sa_sigaction = handle as *const () as usize;
        // Calls that are made within the handler may fail in the same way, in a handler of another signal.
        action.sa_flags = libc::SA_SIGINFO | libc::SA_NODEFER | libc::SA_RESTART;
        check(libc::sigaction(libc::SIGSYS, &action, std::ptr::null_mut()).into())?;
        let mut program = filter(failing.call, failing.own);
        let program = libc::sock_fprog { len: program.len() as u16, filter: program.as_mut_ptr() };
        check(libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0).into())?;
        check(libc::prctl(libc::PR_SET_SECCOMP, libc::SECCOMP_MODE_FILTER, &program).into())?;
    }
    ACTIVE.store(true, Ordering::Relaxed);
    Ok(())
}

/// Lets all further calls succeed. Returns how many there were since [`fail`].
pub fn stop_failing() -> u64 {
    ACTIVE.store(false, Ordering::Relaxed);
    SEEN.load(Ordering::Relaxed)
}

/// A filter that turns a system call into a signal, unless the handler makes it.
fn filter(call: u32, own: bool) -> Vec<libc::sock_filter> {
    /// Offsets in what the system shows to a filter: the number of the call, and both halves of the address behind it.
    const NUMBER: u32 = 0;
    const LOW: u32 = 8;
    const HIGH: u32 = 12;
    let load = libc::BPF_LD | libc::BPF_W | libc::BPF_ABS;
    let equal = libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K;
    let end = libc::BPF_RET | libc::BPF_K;
    let made = &raw const bonfire_testing_syscall_made as u64;
    let high = |at: *const u8| ((at as u64) >> 32) as u32;
    // No library is within the 4 GiB of the program, or within the next ones if its code is in both.
    let (start, stop) = (high(&raw const __executable_start), high(&raw const etext));
    // An instruction, its operand, and how many instructions it skips if it compares equal and if not.
    let program = [
        (load, NUMBER, 0, 0),
        (equal, call, 0, 8),
        (load, LOW, 0, 0),
        (equal, made as u32, 0, 2),
        (load, HIGH, 0, 0),
        (equal, (made >> 32) as u32, 4, 0),
        (load, HIGH, 0, 0),
        (equal, start, 1, 0),
        (equal, stop, 0, u8::from(own)),
        (end, libc::SECCOMP_RET_TRAP, 0, 0),
        (end, libc::SECCOMP_RET_ALLOW, 0, 0),
    ];
    program.map(|(code, k, jt, jf)| libc::sock_filter { code: code as u16, jt, jf, k }).to_vec()
}

/// Makes the call that the signal stands for, or returns the error in its place.
extern "C" fn handle(_: i32, _: *mut libc::siginfo_t, context: *mut libc::c_void) {
    // SAFETY: the system passes the interrupted thread's registers.
    let registers = unsafe { &mut (*context.cast::<libc::ucontext_t>()).uc_mcontext.gregs };
    let register = |which: i32| registers[which as usize];
    let fails = ACTIVE.load(Ordering::Relaxed) && {
        let seen = SEEN.fetch_add(1, Ordering::Relaxed) + 1;
        let (first, step) = (FIRST.load(Ordering::Relaxed), STEP.load(Ordering::Relaxed));
        let later = seen.checked_sub(first).filter(|_| first > 0);
        later.is_some_and(|later| later == 0 || step > 0 && later.is_multiple_of(step))
    };
    let result = if fails {
        -i64::from(ERRNO.load(Ordering::Relaxed))
    } else {
        let arguments =
            [libc::REG_RDI, libc::REG_RSI, libc::REG_RDX, libc::REG_R10, libc::REG_R8, libc::REG_R9].map(register);
        // SAFETY: the program was about to make this call with these arguments.
        unsafe { bonfire_testing_syscall(register(libc::REG_RAX), arguments.as_ptr()) }
    };
    registers[libc::REG_RAX as usize] = result;
}
