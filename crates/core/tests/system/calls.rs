//! The system calls of a rank, and the errors that their manual pages document.

use libc::*;

/// A system call.
pub struct Call {
    pub name: &'static str,
    pub number: c_long,
    /// Whether only those from the program's own code count: the C library makes the same call for itself.
    pub own: bool,
    pub errors: &'static [c_int],
}

const fn any(name: &'static str, number: c_long, errors: &'static [c_int]) -> Call {
    Call { name, number, own: false, errors }
}

const fn own(name: &'static str, number: c_long, errors: &'static [c_int]) -> Call {
    Call { name, number, own: true, errors }
}

/// Without `EINTR`, which sockets that do not block never return.
#[rustfmt::skip]
const SEND: &[c_int] = &[
    EACCES, EAGAIN, EALREADY, EBADF, ECONNRESET, EDESTADDRREQ, EFAULT, EINVAL, EISCONN, EMSGSIZE, ENOBUFS, ENOMEM,
    ENOTCONN, ENOTSOCK, EOPNOTSUPP, EPIPE,
];
#[rustfmt::skip]
const RECEIVE: &[c_int] =
    &[EAGAIN, EBADF, ECONNREFUSED, ECONNRESET, EFAULT, EINVAL, ENOMEM, ENOTCONN, ENOTSOCK, ETIMEDOUT];

/// No rank calls `timerfd_create`, `uname` or `poll`.
#[rustfmt::skip]
pub const CALLS: &[Call] = &[
    own("memfd_create", SYS_memfd_create, &[EFAULT, EINVAL, EMFILE, ENFILE, ENOMEM, EPERM]),
    own("ftruncate", SYS_ftruncate, &[EBADF, EFBIG, EINTR, EINVAL, EIO, EISDIR, EPERM, EROFS, ETXTBSY]),
    own("fallocate", SYS_fallocate, &[
        EBADF, EFBIG, EINTR, EINVAL, EIO, ENODEV, ENOSPC, ENOSYS, EOPNOTSUPP, EPERM, ESPIPE, ETXTBSY,
    ]),
    own("fcntl", SYS_fcntl, &[EBADF, EBUSY, EINVAL, EMFILE, EPERM]),
    own("fstat", SYS_fstat, &[EBADF, EFAULT, ENOMEM, EOVERFLOW]),
    own("mmap", SYS_mmap, &[
        EACCES, EAGAIN, EBADF, EEXIST, EINVAL, ENFILE, ENODEV, ENOMEM, EOVERFLOW, EPERM, ETXTBSY,
    ]),
    own("madvise", SYS_madvise, &[EACCES, EAGAIN, EBADF, EBUSY, EFAULT, EINVAL, EIO, ENOMEM, EPERM]),
    own("munmap", SYS_munmap, &[EINVAL, ENOMEM]),
    own("futex", SYS_futex, &[
        EACCES, EAGAIN, EFAULT, EINTR, EINVAL, ENFILE, ENOMEM, ENOSYS, EPERM, ESRCH, ETIMEDOUT,
    ]),
    own("ppoll", SYS_ppoll, &[EFAULT, EINTR, EINVAL, ENOMEM]),
    own("sendmsg", SYS_sendmsg, &[
        EACCES, EAGAIN, EBADF, ECONNRESET, EFAULT, EINTR, EINVAL, EMSGSIZE, ENOBUFS, ENOMEM, ENOTCONN, ENOTSOCK, EPIPE,
    ]),
    own("recvmsg", SYS_recvmsg, &[
        EAGAIN, EBADF, ECONNREFUSED, ECONNRESET, EFAULT, EINTR, EINVAL, ENOMEM, ENOTCONN, ENOTSOCK,
    ]),
    any("socket", SYS_socket, &[
        EACCES, EAFNOSUPPORT, EINVAL, EMFILE, ENFILE, ENOBUFS, ENOMEM, EPROTONOSUPPORT,
    ]),
    any("socketpair", SYS_socketpair, &[EAFNOSUPPORT, EFAULT, EMFILE, ENFILE, EOPNOTSUPP, EPROTONOSUPPORT]),
    any("bind", SYS_bind, &[
        EACCES, EADDRINUSE, EADDRNOTAVAIL, EBADF, EFAULT, EINVAL, ELOOP, ENAMETOOLONG, ENOENT, ENOMEM, ENOTDIR,
        ENOTSOCK, EROFS,
    ]),
    any("listen", SYS_listen, &[EADDRINUSE, EBADF, ENOTSOCK, EOPNOTSUPP]),
    any("accept4", SYS_accept4, &[
        EAGAIN, EBADF, ECONNABORTED, EFAULT, EHOSTDOWN, EHOSTUNREACH, EINTR, EINVAL, EMFILE, ENETDOWN, ENETUNREACH,
        ENFILE, ENOBUFS, ENOMEM, ENONET, ENOPROTOOPT, ENOTSOCK, EOPNOTSUPP, EPERM, EPROTO,
    ]),
    any("connect", SYS_connect, &[
        EACCES, EADDRINUSE, EADDRNOTAVAIL, EAFNOSUPPORT, EAGAIN, EALREADY, EBADF, ECONNREFUSED, EFAULT, EINPROGRESS,
        EINTR, EISCONN, ENETUNREACH, ENOTSOCK, EPERM, EPROTOTYPE, ETIMEDOUT,
    ]),
    any("getsockname", SYS_getsockname, &[EBADF, EFAULT, EINVAL, ENOBUFS, ENOTSOCK]),
    any("getpeername", SYS_getpeername, &[EBADF, EFAULT, EINVAL, ENOBUFS, ENOTCONN, ENOTSOCK]),
    any("getsockopt", SYS_getsockopt, &[EBADF, EFAULT, EINVAL, ENOMEM, ENOPROTOOPT, ENOTSOCK]),
    any("setsockopt", SYS_setsockopt, &[EBADF, EFAULT, EINVAL, ENOMEM, ENOPROTOOPT, ENOTSOCK]),
    any("shutdown", SYS_shutdown, &[EBADF, EINVAL, ENOTCONN, ENOTSOCK]),
    any("sendto", SYS_sendto, SEND),
    any("recvfrom", SYS_recvfrom, RECEIVE),
    any("readv", SYS_readv, &[EAGAIN, EBADF, EFAULT, EINTR, EINVAL, EIO, EISDIR]),
    any("writev", SYS_writev, &[
        EAGAIN, EBADF, EDESTADDRREQ, EDQUOT, EFAULT, EFBIG, EINTR, EINVAL, EIO, ENOSPC, EPERM, EPIPE,
    ]),
    any("read", SYS_read, &[EAGAIN, EBADF, EFAULT, EINTR, EINVAL, EIO, EISDIR]),
    // Only tokio writes, to wake its own thread, and panics if the descriptor is not the one that it made.
    any("write", SYS_write, &[EAGAIN]),
    any("epoll_create1", SYS_epoll_create1, &[EINVAL, EMFILE, ENFILE, ENOMEM]),
    any("epoll_ctl", SYS_epoll_ctl, &[EBADF, EEXIST, EINVAL, ELOOP, ENOENT, ENOMEM, ENOSPC, EPERM]),
    // Here too tokio panics on the other errors, which all say that a descriptor or an address is wrong.
    any("epoll_wait", SYS_epoll_wait, &[EINTR]),
    any("eventfd2", SYS_eventfd2, &[EINVAL, EMFILE, ENFILE, ENODEV, ENOMEM]),
    any("openat", SYS_openat, &[
        EACCES, EAGAIN, EBADF, EBUSY, EFAULT, EINTR, EINVAL, EISDIR, ELOOP, EMFILE, ENAMETOOLONG, ENFILE, ENODEV,
        ENOENT, ENOMEM, ENOTDIR, ENXIO, EOVERFLOW, EPERM,
    ]),
    any("ioctl", SYS_ioctl, &[EBADF, EFAULT, EINVAL, ENOTTY]),
    // Rust's standard library panics on the other errors, when it makes a hash map.
    any("getrandom", SYS_getrandom, &[EINTR, ENOSYS]),
];
