//! The secret that the ranks of a job share.

use std::ffi::OsString;
use std::fmt;
use std::fs::{File, OpenOptions};
use std::io::Read;
use std::os::unix::ffi::OsStringExt;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::Path;
use std::sync::Arc;

use rustix::fs::OFlags;
use snow::params::HashChoice;
use snow::resolvers::{CryptoResolver, DefaultResolver};
use zeroize::Zeroizing;

use crate::types::Error;

/// A secret that all ranks of a job share, by which they know each other; see
/// [`Builder::secret`](crate::Builder::secret).
///
/// It is shown nowhere, and wiped when the last clone is dropped.
///
/// ```no_run
/// let secret = bonfire_core::Secret::from_file("job.secret")?;
/// let group = bonfire_core::Builder::from_env()?.secret(secret).connect()?;
/// # Ok::<(), bonfire_core::Error>(())
/// ```
#[derive(Clone)]
pub struct Secret(Arc<Zeroizing<[u8; 32]>>);

/// The variable that holds a secret.
const VARIABLE: &str = "BONFIRE_SECRET";
/// The variable that names a file with one.
const FILE: &str = "BONFIRE_SECRET_FILE";

impl Secret {
    /// The shortest secret, in bytes.
    pub const LEAST: usize = 32;

    /// Longer ones are no secrets but other files.
    const MOST: usize = 4096;

    /// A secret of these bytes: at least [`LEAST`](Secret::LEAST), best from a random number generator, and the same on
    /// all ranks. They are wiped.
    ///
    /// # Errors
    /// [`Error::Config`] for too few.
    pub fn new(bytes: impl Into<Vec<u8>>) -> Result<Secret, Error> {
        Secret::of("the secret", Zeroizing::new(bytes.into()))
    }

    /// The secret in a file, without the line ends after it. The file must be a regular one that belongs to this user or to
    /// root, and that nobody else may read or write: mode 0600 or less.
    ///
    /// # Errors
    /// [`Error::Config`] for a file that cannot be read, that others may open, or that holds too few bytes.
    pub fn from_file(path: impl AsRef<Path>) -> Result<Secret, Error> {
        let path = path.as_ref();
        let wrong = |reason: String| Error::Config(format!("the secret's file {}: {reason}", path.display()));
        // What is no file, such as a pipe, must not keep this from going on.
        let file = OpenOptions::new().read(true).custom_flags(OFlags::NONBLOCK.bits() as i32).open(path);
        let file = file.map_err(|e| wrong(format!("cannot be opened: {e}")))?;
        private(&file).map_err(&wrong)?;
        let mut bytes = Zeroizing::new(Vec::with_capacity(Secret::MOST + 1));
        file.take(Secret::MOST as u64 + 1).read_to_end(&mut bytes).map_err(|e| wrong(e.to_string()))?;
        if bytes.len() > Secret::MOST {
            return Err(wrong(format!("is longer than {} bytes, so it is something else", Secret::MOST)));
        }
        while bytes.last().is_some_and(|last| b"\r\n".contains(last)) {
            bytes.pop();
        }
        Secret::of(&format!("the secret in {}", path.display()), bytes)
    }

    /// The secret that the environment gives: `BONFIRE_SECRET_FILE` names a file, as [`from_file`](Secret::from_file) reads
    /// it, or `BONFIRE_SECRET` holds the secret itself. Processes that this one starts inherit the variables unless it
    /// takes them away (`Command::env_remove`).
    ///
    /// # Errors
    /// [`Error::Config`] where both are set, or what is set is no secret.
    pub fn from_env() -> Result<Option<Secret>, Error> {
        Secret::read(|name| std::env::var_os(name))
    }

    pub(super) fn read(variable: impl Fn(&str) -> Option<OsString>) -> Result<Option<Secret>, Error> {
        let held = variable(VARIABLE).map(|text| Zeroizing::new(text.into_vec()));
        match (held, variable(FILE)) {
            (None, None) => Ok(None),
            (Some(_), Some(_)) => {
                Err(Error::Config(format!("both {VARIABLE} and {FILE} are set: which is the secret? Unset one")))
            }
            (Some(bytes), None) => Secret::of(VARIABLE, bytes).map(Some),
            (None, Some(path)) => Secret::from_file(path).map(Some),
        }
    }

    /// `name` says in an error whose bytes these are.
    fn of(name: &str, bytes: Zeroizing<Vec<u8>>) -> Result<Secret, Error> {
        if bytes.len() < Secret::LEAST {
            let reason = "give at least 32 random ones, for example what openssl rand -hex 32 prints";
            return Err(Error::Config(format!("{name} has {} bytes, which can be guessed: {reason}", bytes.len())));
        }
        // Noise wants a key of 32 bytes: HMAC, as the first half of HKDF, makes one of any number.
        let mut hash = DefaultResolver
            .resolve_hash(&HashChoice::Blake2s)
            .ok_or_else(|| Error::Config("this build of Bonfire lacks BLAKE2s".into()))?;
        let mut key = Arc::new(Zeroizing::new([0; 32]));
        if let Some(key) = Arc::get_mut(&mut key) {
            hash.hmac(b"bonfire: the secret of a job", &bytes, &mut key[..]);
        }
        Ok(Secret(key))
    }

    /// For Noise.
    pub(super) fn key(&self) -> &[u8; 32] {
        &self.0
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Secret(..)")
    }
}

/// Whether only this user and root can have read or written the file. It is asked of the open file, so nobody can put
/// another one in its place in between.
fn private(file: &File) -> Result<(), String> {
    let about = file.metadata().map_err(|e| e.to_string())?;
    let (user, mode) = (rustix::process::geteuid().as_raw(), about.mode() & 0o7777);
    if !about.is_file() {
        return Err("is no regular file".into());
    }
    if about.uid() != user && about.uid() != 0 {
        return Err(format!("belongs to user {}, who could change it, and not to user {user} or root", about.uid()));
    }
    if mode & 0o077 != 0 {
        return Err(format!("has the mode {mode:04o}, so that others may use it: chmod 600"));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use rustix::fs::{Mode, chmod};

    use super::*;

    fn reason<T: fmt::Debug>(result: Result<T, Error>) -> String {
        match result {
            Err(Error::Config(reason)) => reason,
            other => panic!("{other:?}"),
        }
    }

    fn file(text: &[u8], mode: u32) -> tempfile::NamedTempFile {
        let mut file = tempfile::NamedTempFile::new().unwrap();
        file.write_all(text).unwrap();
        chmod(file.path(), Mode::from_raw_mode(mode as _)).unwrap();
        file
    }

    #[test]
    fn the_same_bytes_are_the_same_secret_wherever_they_come_from() {
        let text = "0123456789abcdef0123456789abcdef";
        let key = |secret: Secret| *secret.key();
        let new = key(Secret::new(text).unwrap());
        for (end, mode) in [("", 0o600), ("\n", 0o400), ("\r\n", 0o600), ("\n\n", 0o700)] {
            let file = file(format!("{text}{end}").as_bytes(), mode);
            assert_eq!(key(Secret::from_file(file.path()).unwrap()), new);
            let read = Secret::read(|name| (name == FILE).then(|| file.path().into()));
            assert_eq!(key(read.unwrap().unwrap()), new);
        }
        let read = Secret::read(|name| (name == VARIABLE).then(|| text.into()));
        assert_eq!(key(read.unwrap().unwrap()), new);
        assert!(Secret::read(|_| None).unwrap().is_none());
        assert_ne!(key(Secret::new(format!("{text}x")).unwrap()), new);
        assert_ne!(&new[..], text.as_bytes());
    }

    #[test]
    fn a_secret_is_not_shown() {
        let secret = Secret::new(vec![b's'; 32]).unwrap();
        assert_eq!(format!("{secret:?}"), "Secret(..)");
        let builder = format!("{:?}", crate::Builder::default().secret(secret.clone()));
        let shown = |bytes: &[u8]| builder.contains(&format!("{bytes:?}")) || builder.contains("sss");
        assert!(builder.contains("Secret(..)") && !shown(secret.key()), "{builder}");
    }

    #[test]
    fn short_secrets_are_refused_and_not_repeated() {
        for text in ["", "hunter2", "0123456789abcdef0123456789abcde"] {
            let said = [
                reason(Secret::new(text)),
                reason(Secret::read(|name| (name == VARIABLE).then(|| text.into()))),
                reason(Secret::from_file(file(format!("{text}\n").as_bytes(), 0o600).path())),
            ];
            for said in said {
                assert!(said.contains(&format!("has {} bytes", text.len())), "{said}");
                assert!(text.is_empty() || !said.contains(text), "{said}");
            }
        }
    }

    #[test]
    fn files_that_others_may_use_are_refused() {
        for mode in [0o640, 0o604, 0o620, 0o602, 0o610, 0o601, 0o644, 0o666] {
            let said = reason(Secret::from_file(file(&[7; 64], mode).path()));
            assert!(said.contains(&format!("{mode:04o}")) && said.contains("chmod 600"), "{said}");
        }
    }

    #[test]
    fn what_is_no_file_with_a_secret_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let pipe = folder.path().join("pipe");
        assert!(std::process::Command::new("mkfifo").arg("-m600").arg(&pipe).status().unwrap().success());
        assert!(reason(Secret::from_file(&pipe)).contains("no regular file"));
        chmod(folder.path(), Mode::RWXU).unwrap();
        assert!(reason(Secret::from_file(folder.path())).contains("no regular file"));
        assert!(reason(Secret::from_file(folder.path().join("none"))).contains("cannot be opened"));
        assert!(reason(Secret::from_file(file(&[7; 5000], 0o600).path())).contains("longer than 4096 bytes"));
    }

    #[test]
    fn a_file_of_somebody_else_is_refused() {
        if !rustix::process::geteuid().is_root() {
            return eprintln!("SKIPPED: only root can give a file away");
        }
        let file = file(&[7; 64], 0o600);
        std::os::unix::fs::chown(file.path(), Some(12345), None).unwrap();
        assert!(reason(Secret::from_file(file.path())).contains("belongs to user 12345"));
    }

    #[test]
    fn two_variables_contradict_each_other() {
        let said = reason(Secret::read(|_| Some("0123456789abcdef0123456789abcdef".into())));
        assert!(said.contains("both BONFIRE_SECRET and BONFIRE_SECRET_FILE"), "{said}");
    }
}
