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

/// A secret that all ranks of a job share and by which they authenticate each other. See
/// [`Builder::secret`](crate::Builder::secret).
///
/// It is never printed. Its memory is wiped when the last clone is dropped.
///
/// ```no_run
/// let secret = bonfire_core::Secret::from_file("job.secret")?;
/// let group = bonfire_core::Builder::from_env()?.secret(secret).connect()?;
/// # Ok::<(), bonfire_core::Error>(())
/// ```
#[derive(Clone)]
pub struct Secret(Arc<Zeroizing<[u8; 32]>>);

/// The environment variable that holds a secret.
const VARIABLE: &str = "BONFIRE_SECRET";
/// The environment variable that names a file with a secret.
const FILE: &str = "BONFIRE_SECRET_FILE";

impl Secret {
    /// Minimum length of a secret in bytes.
    pub const MIN_BYTES: usize = 32;

    /// Maximum length of a secret file in bytes. A longer file is most likely not a secret.
    const MAX: usize = 4096;

    /// Creates a secret from at least [`MIN_BYTES`](Secret::MIN_BYTES) bytes, the same on all ranks and best drawn from
    /// a random number generator. A `Vec` passed to it is wiped.
    ///
    /// # Errors
    /// [`Error::Config`] if there are too few bytes.
    pub fn new(bytes: impl Into<Vec<u8>>) -> Result<Secret, Error> {
        Secret::of("the secret", Zeroizing::new(bytes.into()))
    }

    /// Reads the secret from a file, without trailing line ends. The file must be a regular file of 32 to 4096 bytes
    /// that belongs to this user or to root, and that no other user may access: mode 0600 or stricter.
    ///
    /// # Errors
    /// [`Error::Config`] if the file cannot be read or does not meet these conditions.
    pub fn from_file(path: impl AsRef<Path>) -> Result<Secret, Error> {
        let path = path.as_ref();
        let wrong = |reason: String| Error::Config(format!("the secret file {}: {reason}", path.display()));
        // Opening something other than a file, such as a pipe, must not block.
        let file = OpenOptions::new().read(true).custom_flags(OFlags::NONBLOCK.bits() as i32).open(path);
        let file = file.map_err(|e| wrong(format!("cannot be opened: {e}")))?;
        check_private(&file).map_err(&wrong)?;
        let mut bytes = Zeroizing::new(Vec::with_capacity(Secret::MAX + 1));
        file.take(Secret::MAX as u64 + 1).read_to_end(&mut bytes).map_err(|e| wrong(e.to_string()))?;
        if bytes.len() > Secret::MAX {
            return Err(wrong(format!("is longer than {} bytes, so it is not a secret", Secret::MAX)));
        }
        while bytes.last().is_some_and(|last| b"\r\n".contains(last)) {
            bytes.pop();
        }
        Secret::of(&format!("the secret in {}", path.display()), bytes)
    }

    /// Reads the secret from the environment: `BONFIRE_SECRET_FILE` names a file for [`from_file`](Secret::from_file),
    /// or `BONFIRE_SECRET` holds the secret itself. Returns `None` if neither is set. Child processes inherit the
    /// variables unless the parent removes them (`Command::env_remove`).
    ///
    /// # Errors
    /// [`Error::Config`] if both variables are set, or the one that is set does not give a valid secret.
    pub fn from_env() -> Result<Option<Secret>, Error> {
        Secret::read(|name| std::env::var_os(name))
    }

    pub(super) fn read(variable: impl Fn(&str) -> Option<OsString>) -> Result<Option<Secret>, Error> {
        let held = variable(VARIABLE).map(|text| Zeroizing::new(text.into_vec()));
        match (held, variable(FILE)) {
            (None, None) => Ok(None),
            (Some(_), Some(_)) => Err(Error::Config(format!("both {VARIABLE} and {FILE} are set: unset one of them"))),
            (Some(bytes), None) => Secret::of(VARIABLE, bytes).map(Some),
            (None, Some(path)) => Secret::from_file(path).map(Some),
        }
    }

    /// Derives the key. `name` names the source of the bytes in errors.
    fn of(name: &str, bytes: Zeroizing<Vec<u8>>) -> Result<Secret, Error> {
        if bytes.len() < Secret::MIN_BYTES {
            let reason = "give at least 32 random bytes, for example the output of openssl rand -hex 32";
            return Err(Error::Config(format!("{name} has {} bytes, few enough to guess: {reason}", bytes.len())));
        }
        // Noise needs a key of 32 bytes. HMAC, the first half of HKDF, derives one from any number of bytes.
        let mut hash = DefaultResolver
            .resolve_hash(&HashChoice::Blake2s)
            .ok_or_else(|| Error::Config("this build of Bonfire lacks BLAKE2s".into()))?;
        let mut key = Arc::new(Zeroizing::new([0; 32]));
        if let Some(key) = Arc::get_mut(&mut key) {
            hash.hmac(b"bonfire: the secret of a job", &bytes, &mut key[..]);
        }
        Ok(Secret(key))
    }

    /// The pre-shared key for Noise.
    pub(super) fn key(&self) -> &[u8; 32] {
        &self.0
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Secret(..)")
    }
}

/// Checks that only this user and root can have read or written the file. It inspects the open file, so the file cannot
/// be replaced between the check and the read.
fn check_private(file: &File) -> Result<(), String> {
    let about = file.metadata().map_err(|e| e.to_string())?;
    let (user, mode) = (rustix::process::geteuid().as_raw(), about.mode() & 0o7777);
    if !about.is_file() {
        return Err("is not a regular file".into());
    }
    if about.uid() != user && about.uid() != 0 {
        return Err(format!("belongs to user {}, which could change it, and not to user {user} or root", about.uid()));
    }
    if mode & 0o077 != 0 {
        return Err(format!("has mode {mode:04o}, which gives other users access: chmod 600"));
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
    fn the_source_of_the_bytes_does_not_matter() {
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
    fn files_with_access_for_others_are_refused() {
        for mode in [0o640, 0o604, 0o620, 0o602, 0o610, 0o601, 0o644, 0o666] {
            let said = reason(Secret::from_file(file(&[7; 64], mode).path()));
            assert!(said.contains(&format!("{mode:04o}")) && said.contains("chmod 600"), "{said}");
        }
    }

    #[test]
    fn paths_that_hold_no_secret_are_refused() {
        let folder = tempfile::tempdir().unwrap();
        let pipe = folder.path().join("pipe");
        assert!(std::process::Command::new("mkfifo").arg("-m600").arg(&pipe).status().unwrap().success());
        assert!(reason(Secret::from_file(&pipe)).contains("not a regular file"));
        chmod(folder.path(), Mode::RWXU).unwrap();
        assert!(reason(Secret::from_file(folder.path())).contains("not a regular file"));
        assert!(reason(Secret::from_file(folder.path().join("none"))).contains("cannot be opened"));
        assert!(reason(Secret::from_file(file(&[7; 5000], 0o600).path())).contains("longer than 4096 bytes"));
    }

    #[test]
    fn a_file_of_another_user_is_refused() {
        if !rustix::process::geteuid().is_root() {
            return eprintln!("SKIPPED: only root can give a file away");
        }
        let file = file(&[7; 64], 0o600);
        std::os::unix::fs::chown(file.path(), Some(12345), None).unwrap();
        assert!(reason(Secret::from_file(file.path())).contains("belongs to user 12345"));
    }

    #[test]
    fn setting_both_variables_is_refused() {
        let said = reason(Secret::read(|_| Some("0123456789abcdef0123456789abcdef".into())));
        assert!(said.contains("both BONFIRE_SECRET and BONFIRE_SECRET_FILE"), "{said}");
    }
}
