//! The folder of a training: who saves into it, what is kept in it, and which set is loaded.

use std::fs;
use std::path::Path;

use bonfire::train::checkpoint::{Scored, Which};
use bonfire::{Checkpoints, Error, Group};
use bonfire_testing::process::{Process, is_child, send_line};
use bonfire_testing::ranks;
use rustix::process::Signal;
use serde_json::{Value, json};

use super::state::{start, step};

/// The names in a folder.
fn names(folder: &Path) -> Vec<String> {
    let names = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap());
    let mut names: Vec<_> = names.collect();
    names.sort();
    names
}

fn refused<T: std::fmt::Debug>(result: Result<T, Error>, expected: &str) -> Error {
    let error = result.unwrap_err();
    assert!(matches!(error, Error::InvalidArgument { .. }), "{error}");
    assert!(error.to_string().contains(expected), "{error}, not {expected}");
    error
}

/// Changes the file that names the job, as a job on another host would write it.
fn taken_by_another_host(folder: &Path) {
    let path = folder.join("job.json");
    let mut job: Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    job["id"] = json!("0123456789abcdef");
    job["processes"] = json!([1]);
    job["process"]["host"] = json!("elsewhere");
    job["process"]["id"] = json!(4711);
    job["process"]["birth"]["machine"] = json!("another");
    job["ended"] = json!(false);
    fs::write(path, job.to_string()).unwrap();
}

#[test]
fn a_job_whose_folder_another_has_taken_over_does_not_save() {
    let folder = tempfile::tempdir().unwrap();
    let errors = ranks(2, |group| {
        let (mut state, ddp) = start(group, 2);
        let mut checkpoints = Checkpoints::new(ddp.group(), folder.path()).unwrap();
        checkpoints.save(&state).unwrap();
        ddp.group().barrier().unwrap();
        if ddp.group().rank() == 0 {
            taken_by_another_host(folder.path());
            // What the other one writes just now.
            fs::create_dir(folder.path().join(".part-89")).unwrap();
        }
        let before = state.samples;
        step(&mut state, &ddp);
        let error = refused(checkpoints.save(&state), "on host `elsewhere` has taken ");
        checkpoints.save_in_background(&state).unwrap();
        assert_eq!(checkpoints.wait().unwrap_err().to_string().split(',').next(), error.to_string().split(',').next());
        assert!(checkpoints.load(&mut state).unwrap());
        assert_eq!(state.samples, before);
        // One that begins after the other takes the folder over again.
        let mut resumed = Checkpoints::new(ddp.group(), folder.path()).unwrap();
        resumed.save(&state).unwrap();
        refused(checkpoints.save(&state), "has taken ");
        error.to_string()
    });
    assert_eq!(errors[0], errors[1]);
    assert!(errors[0].contains("process 4711 (`") && errors[0].contains("give each a folder of its own"), "{errors:?}");
    assert_eq!(names(folder.path()), ["job.json", "set-00000001", "set-00000002"]);
}

#[test]
fn of_two_trainings_in_one_process_the_later_one_saves() {
    let folder = tempfile::tempdir().unwrap();
    let group = || Group::threads(1).unwrap().remove(0);
    let ((mut first, ddp), (second, _)) = (start(group(), 2), start(group(), 2));
    let open = || Checkpoints::new(&group(), folder.path()).unwrap();
    let (mut one, mut other) = (open(), open());
    // One that only loads leaves the folder to the one that saves.
    assert!(!other.load(&mut first).unwrap());
    one.save(&first).unwrap();
    step(&mut first, &ddp);
    one.save(&first).unwrap();
    other.save(&second).unwrap();
    let error = refused(one.save(&first), "another `Checkpoints` of process ");
    assert!(error.to_string().contains(&folder.path().display().to_string()), "{error}");
    other.save(&second).unwrap();
    assert_eq!(names(folder.path()), ["job.json", "set-00000003", "set-00000004"]);
}

/// A job of a process of its own holds the folder until it drops its `Checkpoints` or is killed.
#[cfg(target_os = "linux")]
#[test]
fn a_job_does_not_begin_where_another_saves_that_still_runs() {
    const NAME: &str = "shared::checkpoints::folder::a_job_does_not_begin_where_another_saves_that_still_runs";
    const FOLDER: &str = "FOLDER";
    if is_child() {
        let folder = std::env::var_os(FOLDER).expect("set by the parent");
        let mut checkpoints = Checkpoints::new(&Group::threads(1).unwrap()[0], folder).unwrap();
        checkpoints.save(&start(Group::threads(1).unwrap().remove(0), 2).0).unwrap();
        send_line(std::process::id());
        loop {
            std::thread::park();
        }
    }
    let folder = tempfile::tempdir().unwrap();
    let variables = [(FOLDER, folder.path().to_str().expect("a path of text").to_owned())];
    let mut process = Process::start(NAME, &variables);
    let id = process.read_line();
    ranks(2, |group| {
        let error = refused(Checkpoints::new(&group, folder.path()), &format!("process {id} (`"));
        assert!(error.to_string().contains("and still runs"), "{error}");
        // Loading does not disturb it.
        let (mut state, ddp) = start(group, 2);
        assert!(Checkpoints::read_only(ddp.group(), folder.path()).unwrap().load(&mut state).unwrap());
    });
    process.signal(Signal::KILL);
    process.end();
    ranks(2, |group| {
        let (state, ddp) = start(group, 2);
        Checkpoints::new(ddp.group(), folder.path()).unwrap().save(&state).unwrap();
    });
    assert_eq!(names(folder.path()), ["job.json", "set-00000001", "set-00000002"]);
    let job = fs::read_to_string(folder.path().join("job.json")).unwrap();
    assert!(job.contains("\"ended\": true"), "{job}");
}

/// Each removal of a folder fails, as where another host of a network file system has a file in it open.
#[cfg(all(target_os = "linux", target_arch = "x86_64"))]
#[test]
fn what_cannot_be_removed_is_in_no_saves_way() {
    use bonfire_testing::syscalls::{self, Failing};

    const NAME: &str = "shared::checkpoints::folder::what_cannot_be_removed_is_in_no_saves_way";
    const FOLDER: &str = "FOLDER";
    if is_child() {
        let folder = std::env::var_os(FOLDER).expect("set by the parent");
        let groups = Group::threads(2).unwrap();
        std::thread::scope(|scope| {
            for group in groups {
                let folder = &folder;
                scope.spawn(move || {
                    let (mut state, ddp) = start(group, 2);
                    let mut checkpoints = Checkpoints::new(ddp.group(), folder).unwrap().keep(1);
                    if ddp.group().rank() == 0 {
                        // unlinkat, with the error of a folder that is not empty.
                        let failing = Failing { call: 263, own: false, errno: 39, first: 1, step: 1 };
                        syscalls::fail(failing).expect("a filter");
                    }
                    for _ in 0..3 {
                        checkpoints.save(&state).unwrap();
                        step(&mut state, &ddp);
                    }
                });
            }
        });
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    fs::create_dir(folder.path().join(".part-0123")).unwrap();
    fs::create_dir(folder.path().join(".old-1")).unwrap();
    let variables = [(FOLDER, folder.path().to_str().expect("a path of text").to_owned())];
    assert!(Process::start(NAME, &variables).end().success());
    let sets: Vec<_> = names(folder.path()).into_iter().filter(|name| name.starts_with("set-")).collect();
    assert_eq!(sets, ["set-00000003"]);
    // Another save removes all of it.
    ranks(1, |group| {
        let (state, ddp) = start(group, 2);
        Checkpoints::new(ddp.group(), folder.path()).unwrap().save(&state).unwrap();
    });
    assert_eq!(names(folder.path()), ["job.json", "set-00000003", "set-00000004"]);
}

#[test]
fn a_folder_that_is_opened_to_load_is_not_changed() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("sets");
    ranks(2, |group| {
        let (mut state, ddp) = start(group, 2);
        let mut reader = Checkpoints::read_only(ddp.group(), &path).unwrap();
        assert!(!reader.load(&mut state).unwrap() && reader.sets().unwrap().is_empty() && !path.exists());
        let mut writer = Checkpoints::new(ddp.group(), &path).unwrap();
        writer.save(&state).unwrap();
        refused(reader.save(&state), "opened to load only; open it with `Checkpoints::new`");
        refused(reader.save_in_background(&state), "opened to load only");
        assert!(reader.load(&mut state).unwrap());
        drop(reader);
        writer.save(&state).unwrap();
    });
    assert_eq!(names(&path), ["job.json", "set-00000001", "set-00000002"]);
}

#[test]
fn the_best_set_is_kept_beside_the_newest_and_any_can_be_loaded() {
    let folder = tempfile::tempdir().unwrap();
    ranks(3, |group| {
        let (mut state, ddp) = start(group, 2);
        let mut checkpoints = Checkpoints::new(ddp.group(), folder.path()).unwrap().keep(2);
        assert!(!checkpoints.load_set(Which::Best, &mut state).unwrap());
        for score in [None, Some(-0.5), Some(0.75), Some(0.25), Some(0.75), Some(-3.0), Some(0.5), None] {
            step(&mut state, &ddp);
            match score {
                Some(score) => checkpoints.save_in_background(Scored(&state, score)).unwrap(),
                None => checkpoints.save(&state).unwrap(),
            }
        }
        let sets = checkpoints.sets().unwrap();
        let found = sets.iter().map(|set| (set.number, set.score));
        assert_eq!(found.collect::<Vec<_>>(), [(5, Some(0.75)), (7, Some(0.5)), (8, None)]);
        let mut loads = |which: Which, batch: usize| {
            assert!(checkpoints.load_set(which, &mut state).unwrap());
            assert_eq!(state.samples, batch);
        };
        loads(Which::Best, 5);
        loads(Which::Newest, 8);
        loads(7.into(), 7);
        let error = checkpoints.load_set(6, &mut state);
        refused(error, "has no set 6; it has 5, 7, 8");
        assert_eq!(state.samples, 7);
    });
}

#[test]
fn a_score_is_a_number_that_all_ranks_have() {
    let folder = tempfile::tempdir().unwrap();
    ranks(2, |group| {
        let rank = group.rank();
        let (state, ddp) = start(group, 2);
        let mut checkpoints = Checkpoints::new(ddp.group(), folder.path()).unwrap();
        let differs = checkpoints.save(Scored(&state, rank as f64));
        refused(differs, "rank 0 gives the score 0, and rank 1 1; give the same on all ranks");
        let score = if rank == 1 { f64::NAN } else { 0.5 };
        refused(checkpoints.save(Scored(&state, score)), "the score is NaN; give a finite one, or none");
        let error = if rank == 1 { checkpoints.save(&state) } else { checkpoints.save(Scored(&state, 0.5)) };
        refused(error, "rank 0 gives the score 0.5, and rank 1 none");
        assert!(checkpoints.sets().unwrap().is_empty());
        checkpoints.save(Scored(&state, f64::MIN)).unwrap();
        assert_eq!(checkpoints.sets().unwrap()[0].score, Some(f64::MIN));
    });
}
