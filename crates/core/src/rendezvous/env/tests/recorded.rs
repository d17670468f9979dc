//! Environments as set by launchers. Those of torchrun 2.15, Open MPI 4.1 and 5.0, MPICH and Intel MPI are recordings;
//! the others follow the launchers' documentation.

pub type Environ<'a> = &'a [(&'a str, &'a str)];

pub const TORCHRUN: Environ = &[
    ("GROUP_RANK", "0"),
    ("GROUP_WORLD_SIZE", "1"),
    ("LOCAL_RANK", "1"),
    ("LOCAL_WORLD_SIZE", "2"),
    ("MASTER_ADDR", "node7.cluster"),
    ("MASTER_PORT", "45295"),
    ("RANK", "1"),
    ("ROLE_RANK", "1"),
    ("ROLE_WORLD_SIZE", "2"),
    ("TORCHELASTIC_MAX_RESTARTS", "0"),
    ("TORCHELASTIC_RESTART_COUNT", "0"),
    ("TORCHELASTIC_RUN_ID", "a11c091b-960e"),
    ("TORCHELASTIC_USE_AGENT_STORE", "True"),
    ("WORLD_SIZE", "2"),
];

pub const TORCHRUN_ON_TWO: Environ = &[
    ("GROUP_WORLD_SIZE", "2"),
    ("LOCAL_WORLD_SIZE", "2"),
    ("MASTER_ADDR", "fd00::7"),
    ("MASTER_PORT", "29511"),
    ("RANK", "3"),
    ("TORCHELASTIC_RUN_ID", "none"),
    ("TORCHELASTIC_USE_AGENT_STORE", "False"),
    ("WORLD_SIZE", "4"),
];

pub const SRUN: Environ = &[
    ("SLURM_JOB_ID", "1234"),
    ("SLURM_JOBID", "1234"),
    ("SLURM_JOB_NODELIST", "node[001-005]"),
    ("SLURM_JOB_NUM_NODES", "5"),
    ("SLURM_LAUNCH_NODE_IPADDR", "10.1.0.1"),
    ("SLURM_LOCALID", "1"),
    ("SLURM_NNODES", "4"),
    ("SLURM_NODEID", "1"),
    ("SLURM_NODELIST", "node[002-005]"),
    ("SLURM_NPROCS", "8"),
    ("SLURM_NTASKS", "8"),
    ("SLURM_PROCID", "3"),
    ("SLURM_STEPID", "0"),
    ("SLURM_STEP_ID", "0"),
    ("SLURM_STEP_NODELIST", "node[002-005]"),
    ("SLURM_STEP_NUM_NODES", "4"),
    ("SLURM_STEP_NUM_TASKS", "8"),
    ("SLURM_STEP_TASKS_PER_NODE", "2(x4)"),
    ("SLURM_TASK_PID", "7321"),
];

pub const SRUN_ON_ONE: Environ = &[
    ("SLURM_JOB_ID", "9999"),
    ("SLURM_NTASKS", "2"),
    ("SLURM_PROCID", "0"),
    ("SLURM_STEP_ID", "2"),
    ("SLURM_STEP_NODELIST", "gpu-7"),
    ("SLURM_STEP_NUM_NODES", "1"),
    ("SLURM_STEP_NUM_TASKS", "2"),
];

/// The environment of a batch script itself, outside of any srun.
pub const SBATCH: Environ = &[
    ("SLURM_JOB_ID", "1234"),
    ("SLURM_JOB_NODELIST", "node[001-002]"),
    ("SLURM_LOCALID", "0"),
    ("SLURM_NNODES", "2"),
    ("SLURM_NTASKS", "8"),
    ("SLURM_PROCID", "0"),
];

pub const OPEN_MPI_4: Environ = &[
    ("OMPI_COMM_WORLD_LOCAL_RANK", "0"),
    ("OMPI_COMM_WORLD_LOCAL_SIZE", "2"),
    ("OMPI_COMM_WORLD_NODE_RANK", "0"),
    ("OMPI_COMM_WORLD_RANK", "0"),
    ("OMPI_COMM_WORLD_SIZE", "2"),
    ("OMPI_MCA_ess_base_jobid", "1888747521"),
    ("OMPI_MCA_orte_hnp_uri", "1888747520.0;tcp://192.0.2.2:46677"),
    ("OMPI_UNIVERSE_SIZE", "2"),
    ("PMIX_NAMESPACE", "1888747521"),
    ("PMIX_RANK", "0"),
];

pub const OPEN_MPI_5: Environ = &[
    ("OMPI_COMM_WORLD_LOCAL_RANK", "1"),
    ("OMPI_COMM_WORLD_LOCAL_SIZE", "2"),
    ("OMPI_COMM_WORLD_RANK", "1"),
    ("OMPI_COMM_WORLD_SIZE", "4"),
    ("OMPI_VERSION", "5.0.11"),
    ("PMIX_NAMESPACE", "prterun-vm-7820@1"),
    ("PMIX_RANK", "1"),
    ("PRTE_LAUNCHED", "1"),
];

pub const HYDRA: Environ = &[
    ("MPI_LOCALNRANKS", "2"),
    ("MPI_LOCALRANKID", "1"),
    ("PMI_FD", "11"),
    ("PMI_HOSTNAME", "vm"),
    ("PMI_RANK", "1"),
    ("PMI_SIZE", "2"),
];

pub const INTEL_MPI: Environ = &[
    ("HYDRA_BSTRAP_LAUNCHER", "ssh"),
    ("I_MPI_HYDRA_UUID", "ac1e0000-2838-ab6d-de60-0600cb0c4361"),
    ("MPI_LOCALNRANKS", "2"),
    ("MPI_LOCALRANKID", "0"),
    ("PMI_RANK", "2"),
    ("PMI_SIZE", "4"),
];

pub const MVAPICH2: Environ = &[
    ("MV2_COMM_WORLD_LOCAL_RANK", "1"),
    ("MV2_COMM_WORLD_LOCAL_SIZE", "2"),
    ("MV2_COMM_WORLD_RANK", "1"),
    ("MV2_COMM_WORLD_SIZE", "2"),
];

pub const TRAINER: Environ = &[
    ("PET_MASTER_ADDR", "train-node-0-0.train"),
    ("PET_MASTER_PORT", "29400"),
    ("PET_NNODES", "3"),
    ("PET_NODE_RANK", "2"),
    ("PET_NPROC_PER_NODE", "1"),
];

pub const PYTORCH_JOB: Environ = &[
    ("MASTER_ADDR", "train-master-0"),
    ("MASTER_PORT", "23456"),
    ("PYTHONUNBUFFERED", "1"),
    ("RANK", "1"),
    ("WORLD_SIZE", "3"),
];

/// As newer operators set it if the job does not give the number of processes per pod.
pub const PYTORCH_JOB_AUTO: Environ = &[
    ("MASTER_ADDR", "train-master-0"),
    ("MASTER_PORT", "23456"),
    ("PET_MASTER_ADDR", "train-master-0"),
    ("PET_MASTER_PORT", "23456"),
    ("PET_NNODES", "3"),
    ("PET_NODE_RANK", "1"),
    ("PET_NPROC_PER_NODE", "auto"),
    ("RANK", "1"),
    ("WORLD_SIZE", "3"),
];

pub const ALL: [Environ; 13] = [
    TORCHRUN,
    TORCHRUN_ON_TWO,
    SRUN,
    SRUN_ON_ONE,
    SBATCH,
    OPEN_MPI_4,
    OPEN_MPI_5,
    HYDRA,
    INTEL_MPI,
    MVAPICH2,
    TRAINER,
    PYTORCH_JOB,
    PYTORCH_JOB_AUTO,
];

/// Environments in which fallback variables are read: those that others take precedence over.
pub const OTHERS: [Environ; 3] = [
    &[("SLURM_STEPID", "0"), ("SLURM_PROCID", "0"), ("SLURM_NTASKS", "1")],
    &[("OMPI_COMM_WORLD_RANK", "0"), ("OMPI_COMM_WORLD_SIZE", "1")],
    &[("BONFIRE_RANK", "0"), ("BONFIRE_WORLD_SIZE", "1")],
];
