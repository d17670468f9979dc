mod recorded;

use std::cell::RefCell;
use std::collections::BTreeSet;

use self::recorded::*;
use super::*;

/// Reads these environments. The first variable of a name counts.
fn from(environs: &[Environ]) -> Result<Settings, Error> {
    let all = environs.concat();
    read(|name| all.iter().find(|(other, _)| *other == name).map(|(_, value)| (*value).to_owned())).map(|e| e.settings)
}

/// Rank, size, address and whether there are several hosts, from an environment in which nothing is missing.
fn complete(environs: &[Environ]) -> (usize, usize, String, Option<bool>) {
    let settings = from(environs).unwrap();
    assert_eq!(settings.complete(), Ok(()));
    (settings.rank, settings.world_size, settings.address, settings.source.several)
}

fn line(environs: &[Environ]) -> String {
    from(environs).unwrap().launched().expect("a launcher").to_string()
}

fn config_error(environs: &[Environ]) -> String {
    match from(environs).unwrap_err() {
        Error::Config(reason) => reason,
        error => panic!("{error:?}"),
    }
}

/// Why these settings cannot connect. Code could still set what is missing.
fn missing(environs: &[Environ]) -> String {
    from(environs).unwrap().complete().unwrap_err().to_string()
}

fn port(address: &str) -> u16 {
    address.rsplit_once(':').unwrap().1.parse().unwrap()
}

#[test]
fn every_launcher_is_detected() {
    let cases: [(Environ, usize, usize, &str, Option<bool>); 8] = [
        (TORCHRUN_ON_TWO, 3, 4, "[fd00::7]:29511", Some(true)),
        (SRUN, 3, 8, "node002:62674", Some(true)),
        (SRUN_ON_ONE, 0, 2, "127.0.0.1:64265", Some(false)),
        (TRAINER, 2, 3, "train-node-0-0.train:29400", Some(true)),
        (PYTORCH_JOB, 1, 3, "train-master-0:23456", None),
        (PYTORCH_JOB_AUTO, 1, 3, "train-master-0:23456", Some(true)),
        (&[("RANK", "0"), ("WORLD_SIZE", "1")], 0, 1, "", None),
        (
            &[
                ("RANK", "1"),
                ("WORLD_SIZE", "4"),
                ("LOCAL_WORLD_SIZE", "4"),
                ("MASTER_ADDR", "a"),
                ("MASTER_PORT", "7"),
            ],
            1,
            4,
            "127.0.0.1:7",
            Some(false),
        ),
    ];
    for (environ, rank, size, address, several) in cases {
        assert_eq!(complete(&[environ]), (rank, size, address.to_owned(), several), "{environ:?}");
    }
    for (environ, rank) in [(TORCHRUN, 1), (OPEN_MPI_4, 0), (HYDRA, 1), (MVAPICH2, 1)] {
        let (found, size, address, several) = complete(&[environ]);
        assert_eq!((found, size, several), (rank, 2, Some(false)), "{environ:?}");
        assert!(address.starts_with("127.0.0.1:") && port(&address) >= 61440, "{environ:?}: {address}");
        assert_eq!(complete(&[environ]).2, address);
    }
}

#[test]
fn one_line_says_what_was_detected_and_what_is_missing() {
    assert_eq!(line(&[SRUN]), "rank 3 of 8 by Slurm (job 1234, step 0): rank 0 at node002:62674");
    let line_of_five = line(&[OPEN_MPI_5]);
    assert!(line_of_five.starts_with("rank 1 of 4 by Open MPI; BONFIRE_ADDRESS is not set"), "{line_of_five}");
    assert_eq!(
        line(&[&[("BONFIRE_RANK", "0"), ("BONFIRE_WORLD_SIZE", "1")]]),
        "rank 0 of 1 by BONFIRE_RANK, BONFIRE_WORLD_SIZE"
    );
    let half = line(&[&[("SLURM_PROCID", "3"), ("SLURM_STEP_ID", "0"), ("SLURM_JOB_ID", "7")]]);
    assert!(
        half.starts_with("rank 3 of ? by Slurm (job 7, step 0); SLURM_NTASKS is not set, though SLURM_PROCID is"),
        "{half}"
    );
    assert!(from(&[SBATCH]).unwrap().launched().is_none());
    assert!(missing(&[SBATCH]).contains("Slurm's job 1234, but not a task of it: start the ranks with srun"));
    let interactive: Environ = &[("SLURM_STEP_ID", "4294967290"), ("SLURM_STEP_NUM_TASKS", "1")];
    assert!(missing(&[interactive, SBATCH]).contains("start the ranks with srun"));
}

#[test]
fn ports_differ_from_job_to_job_and_from_step_to_step() {
    let of = |job: &str, step: &str| port(&complete(&[&[("SLURM_JOB_ID", job), ("SLURM_STEP_ID", step)], SRUN]).2);
    assert_eq!(of("1234", "0"), 62674);
    assert_eq!(of("1235", "0"), 62675);
    assert_ne!(of("1234", "0"), of("1234", "1"));
    assert!((61440..=65535).contains(&of("18446744073709551615", "4294967000")));
    for (name, environ) in
        [("TORCHELASTIC_RUN_ID", TORCHRUN), ("MASTER_PORT", TORCHRUN), ("PMIX_NAMESPACE", OPEN_MPI_4)]
    {
        let of = |value| port(&complete(&[&[(name, value)], environ]).2);
        assert_ne!(of("7"), of("8"), "{name}");
    }
    // The agent listens at the port itself.
    assert_ne!(port(&complete(&[TORCHRUN]).2), 45295);
}

#[test]
fn each_of_bonfires_own_variables_overrides_the_launchers() {
    let address: Environ = &[("BONFIRE_ADDRESS", "10.0.0.9:1000")];
    assert_eq!(complete(&[address, OPEN_MPI_5]), (1, 4, "10.0.0.9:1000".into(), Some(true)));
    assert_eq!(line(&[address, OPEN_MPI_5]), "rank 1 of 4 by Open MPI, BONFIRE_ADDRESS: rank 0 at 10.0.0.9:1000");
    assert_eq!(complete(&[&[("BONFIRE_RANK", "5")], SRUN]).0, 5);
    let own: Environ = &[("BONFIRE_RANK", "1"), ("BONFIRE_WORLD_SIZE", "2"), ("BONFIRE_ADDRESS", "a:1")];
    for environ in ALL {
        let (rank, size, address, several) = complete(&[own, environ]);
        assert_eq!((rank, size, &*address, several), (1, 2, "a:1", None));
    }
    // If they are complete, the launcher's variables are not read.
    assert_eq!(complete(&[own, &[("RANK", "x")], SRUN]).0, 1);
    let local = |here| complete(&[own, &[("BONFIRE_LOCAL_WORLD_SIZE", here)]]).3;
    assert_eq!((local("1"), local("2")), (Some(true), Some(false)));
}

#[test]
fn a_value_set_by_code_is_not_missing() {
    let mut settings = from(&[OPEN_MPI_5]).unwrap();
    settings.source.missing.address = None;
    assert_eq!(settings.complete(), Ok(()));
    // A world of one needs no address, whether the launcher or code says so.
    let mut settings = from(&[OPEN_MPI_5]).unwrap();
    settings.world_size = 1;
    assert_eq!(settings.complete(), Ok(()));
}

#[test]
fn master_addr_and_port_complete_a_launcher() {
    let master: Environ = &[("MASTER_ADDR", "head"), ("MASTER_PORT", "29500")];
    assert_eq!(complete(&[master, OPEN_MPI_5]), (1, 4, "head:29500".into(), Some(true)));
    assert_eq!(complete(&[master, INTEL_MPI]).2, "head:29500");
    assert_eq!(complete(&[master, SRUN]).2, "head:29500");
    assert_eq!(complete(&[&master[..1], SRUN]).2, "head:62674");
    assert_eq!(complete(&[&master[1..], SRUN]).2, "node002:29500");
    assert_eq!(complete(&[master, HYDRA]).2, "127.0.0.1:29500");
    // Loopback is not a valid address for several hosts.
    let here: Environ = &[("MASTER_ADDR", "localhost"), ("MASTER_PORT", "29500")];
    assert_eq!(complete(&[here, SRUN]).2, "node002:29500");
    let reason = missing(&[here, OPEN_MPI_5]);
    assert!(reason.contains("MASTER_ADDR is localhost") && reason.contains("several"), "{reason}");
    // The port comes from the job's name, which is the same on all hosts.
    assert!(complete(&[&master[..1], INTEL_MPI]).2.starts_with("head:6"));
    for environ in [OPEN_MPI_5, INTEL_MPI, &[("PMI_RANK", "0"), ("PMI_SIZE", "2")]] {
        let reason = missing(&[environ]);
        assert!(reason.contains("BONFIRE_ADDRESS") && reason.contains("BONFIRE_TRANSPORT=mpi"), "{reason}");
    }
    let reason = missing(&[&PYTORCH_JOB[2..]]);
    assert!(reason.contains("BONFIRE_ADDRESS is not set") && reason.contains("MASTER_ADDR"), "{reason}");
}

#[test]
fn the_innermost_launcher_counts() {
    // Ranks of torchrun in tasks of Slurm, one on each node.
    let agents: Environ = &[("SLURM_PROCID", "1"), ("SLURM_STEP_NUM_TASKS", "4")];
    assert_eq!(complete(&[TORCHRUN_ON_TWO, agents, SRUN]).0, 3);
    assert!(line(&[TORCHRUN_ON_TWO, SRUN]).contains("torchrun (run none)"));
    assert!(line(&[TORCHRUN, TRAINER]).contains("torchrun"));
    // srun --mpi=pmi2: Slurm knows the hosts.
    let pmi2: Environ = &[("PMI_RANK", "3"), ("PMI_SIZE", "8"), ("PMI_JOBID", "1234.0")];
    assert_eq!(complete(&[pmi2, SRUN]), (3, 8, "node002:62674".into(), Some(true)));
    // mpirun in a task for which Slurm had also set up an MPI library, and mpirun in a batch script.
    let pmi2: Environ = &[("PMI_RANK", "0"), ("PMI_SIZE", "1"), ("SLURM_PROCID", "0"), ("SLURM_STEP_NUM_TASKS", "1")];
    assert!(line(&[OPEN_MPI_4, pmi2, SRUN]).starts_with("rank 0 of 2 by Open MPI: rank 0 at 127.0.0.1:"));
    assert!(line(&[OPEN_MPI_4, SRUN]).contains("Open MPI"));
    assert!(line(&[OPEN_MPI_4, SBATCH]).contains("Open MPI"));
    assert!(line(&[SRUN, &[("PMIX_RANK", "3"), ("PMIX_NAMESPACE", "slurm.pmix.1234.0")]]).contains("Slurm"));
    // Both sets of Kubeflow's variables at once, with the same numbers.
    assert!(line(&[TRAINER, &[("RANK", "2"), ("WORLD_SIZE", "3")]]).contains("Kubeflow"));
    // A script that repeats what Slurm says.
    assert!(line(&[SRUN, &[("RANK", "3"), ("WORLD_SIZE", "8")]]).contains("Slurm"));
    // Half of a pair is ignored if a launcher is detected.
    assert!(line(&[SRUN, &[("RANK", "0")]]).contains("Slurm"));
}

#[test]
fn a_rank_without_a_group_is_an_error_and_never_threads() {
    let (_, alone) = Launched::VARIABLES[Launched::VARIABLES.len() - 1];
    let names = alone.iter().chain(&["BONFIRE_LOCAL_RANK", "SLURM_PROCID"]);
    for name in names {
        let environ: Environ = &[(*name, "3")];
        let settings = from(&[environ]).unwrap();
        let launched = settings.launched().unwrap_or_else(|| panic!("{name} means threads"));
        assert_eq!((launched.by.as_str(), launched.rank, launched.world_size), (*name, None, None));
        let reason = missing(&[environ]);
        for part in ["BONFIRE_RANK is not set", "bonfire run -n", &format!("{name} is 3"), &format!("unset {name}")] {
            assert!(reason.contains(part), "{reason}");
        }
        // Launchers that are recognised set some of them too, and so does code that describes the group.
        assert_eq!(complete(&[environ, SRUN]), complete(&[SRUN]));
        let own: Environ = &[("BONFIRE_RANK", "1"), ("BONFIRE_WORLD_SIZE", "2"), ("BONFIRE_ADDRESS", "a:1")];
        assert_eq!(complete(&[own, environ]).0, 1);
    }
    // An address for all jobs is no rank, and a batch script has the number of the first task.
    for environ in [&[("BONFIRE_ADDRESS", "head:1")][..], &[("SLURM_PROCID", "0")], SBATCH] {
        assert!(from(&[environ]).unwrap().launched().is_none(), "{environ:?}");
    }
}

#[test]
fn contradictions_are_named() {
    let cases: [(&[Environ], &str, &str); 11] = [
        (&[SRUN, &[("RANK", "0"), ("WORLD_SIZE", "8")]], "SLURM_PROCID is 3", "RANK is 0"),
        (&[OPEN_MPI_4, &[("RANK", "0"), ("WORLD_SIZE", "4")]], "OMPI_COMM_WORLD_SIZE is 2", "WORLD_SIZE is 4"),
        (&[TRAINER, &[("RANK", "1"), ("WORLD_SIZE", "3")]], "PET_NODE_RANK is 2", "RANK is 1"),
        (&[OPEN_MPI_4, HYDRA], "OMPI_COMM_WORLD_RANK is 0", "PMI_RANK is 1"),
        (&[&[("SLURM_PROCID", "8")], SRUN], "SLURM_PROCID is 8", "SLURM_STEP_NUM_TASKS is 8"),
        (&[&[("RANK", "2")], TORCHRUN], "RANK is 2", "WORLD_SIZE is 2"),
        (&[&[("PET_NODE_RANK", "3")], TRAINER], "PET_NODE_RANK is 3", "PET_NNODES is 3"),
        (&[&[("PMI_SIZE", "0")], HYDRA], "PMI_RANK is 1", "PMI_SIZE is 0"),
        (&[&[("LOCAL_WORLD_SIZE", "3")], TORCHRUN], "LOCAL_WORLD_SIZE is 3", "WORLD_SIZE is 2"),
        (&[&[("MPI_LOCALNRANKS", "3")], HYDRA], "MPI_LOCALNRANKS is 3", "PMI_SIZE is 2"),
        (
            &[&[("BONFIRE_LOCAL_WORLD_SIZE", "3"), ("BONFIRE_RANK", "0"), ("BONFIRE_WORLD_SIZE", "2")]],
            "BONFIRE_LOCAL_WORLD_SIZE is 3",
            "BONFIRE_WORLD_SIZE is 2",
        ),
    ];
    for (environs, one, other) in cases {
        let reason = config_error(environs);
        assert!(reason.contains(one) && reason.contains(other), "{reason}");
    }
}

#[test]
fn malformed_variables_of_launchers_are_named() {
    let cases: [(Environ, &str, &str); 14] = [
        (TORCHRUN, "RANK", "one"),
        (SRUN, "MASTER_ADDR", "node[1-2]"),
        (OPEN_MPI_4, "MASTER_ADDR", "node1:29400"),
        (PYTORCH_JOB_AUTO, "PET_NPROC_PER_NODE", "4"),
        (TORCHRUN, "MASTER_PORT", "0"),
        (PYTORCH_JOB, "MASTER_PORT", "tcp://10.0.0.1:23456"),
        (SRUN, "SLURM_PROCID", ""),
        (SRUN, "SLURM_JOB_ID", "1234_5"),
        (SRUN, "SLURM_STEP_NODELIST", "node[002-"),
        (OPEN_MPI_4, "OMPI_COMM_WORLD_LOCAL_SIZE", "2(x4)"),
        (HYDRA, "PMI_RANK", "-1"),
        (TRAINER, "PET_NNODES", "1:3"),
        (TRAINER, "PET_NPROC_PER_NODE", "auto"),
        (TRAINER, "PET_NPROC_PER_NODE", "4"),
    ];
    for (environ, name, value) in cases {
        let reason = config_error(&[&[(name, value)], environ]);
        assert!(reason.contains(&format!("{name} is '{value}'")), "{reason}");
    }
    assert!(config_error(&[&[("PET_NPROC_PER_NODE", "gpu")], TRAINER]).contains("torchrun or `bonfire run`"));
    assert_eq!(complete(&[&[("PET_NNODES", "3:3")], TRAINER]).1, 3);
}

#[test]
fn ranks_on_several_hosts_need_a_secret_and_those_on_one_do_not() {
    for environ in [SRUN, TRAINER, TORCHRUN_ON_TWO] {
        let settings = from(&[environ]).unwrap();
        let error = settings.check().unwrap_err().to_string();
        assert!(
            settings.spans_hosts() && error.contains("BONFIRE_SECRET_FILE") && error.contains("several hosts"),
            "{error}"
        );
    }
    for environ in [TORCHRUN, SRUN_ON_ONE, OPEN_MPI_4, HYDRA, MVAPICH2] {
        assert_eq!(from(&[environ]).unwrap().check(), Ok(()));
    }
    // A loopback address: all ranks are on this host, as with two agents of torchrun on one machine.
    for host in ["localhost", "127.0.0.1", "[::1]"] {
        let settings = from(&[&[("MASTER_ADDR", host)], TORCHRUN_ON_TWO]).unwrap();
        assert_eq!((settings.spans_hosts(), settings.check()), (false, Ok(())));
    }
    // A configured interface implies other hosts, unless a launcher says otherwise.
    let interface: Environ = &[("BONFIRE_IFACE", "eth")];
    assert!(from(&[interface, PYTORCH_JOB]).unwrap().spans_hosts());
    assert!(!from(&[PYTORCH_JOB]).unwrap().spans_hosts());
    assert!(!from(&[interface, TORCHRUN]).unwrap().spans_hosts());
    // So does a secret.
    let secret = crate::auth::Secret::new([7; 32]).ok();
    for (environ, spans) in [(PYTORCH_JOB, true), (TORCHRUN, false)] {
        assert_eq!(Settings { secret: secret.clone(), ..from(&[environ]).unwrap() }.spans_hosts(), spans);
    }
}

#[test]
fn every_variable_that_is_read_is_listed_by_launcher() {
    let asked = RefCell::new(BTreeSet::new());
    for environ in ALL.into_iter().chain(OTHERS) {
        let value = |name: &str| environ.iter().find(|(other, _)| *other == name).map(|(_, value)| (*value).to_owned());
        let ask = |name: &str| {
            asked.borrow_mut().insert(name.to_owned());
            value(name)
        };
        read(ask).unwrap();
    }
    let known: BTreeSet<String> =
        Launched::VARIABLES.iter().flat_map(|(_, names)| names.iter().map(|name| (*name).to_owned())).collect();
    let asked = asked.into_inner();
    assert_eq!(asked.difference(&known).collect::<Vec<_>>(), Vec::<&String>::new());
    // `BONFIRE_TRACE` is only read when a group fails.
    assert_eq!(known.difference(&asked).collect::<Vec<_>>(), ["BONFIRE_TRACE"]);
}
