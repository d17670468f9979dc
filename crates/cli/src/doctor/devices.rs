//! GPUs and the libraries that use them, found by their files: no library is loaded.

use serde_json::json;

use super::findings::Findings;
use crate::machine::Machine;
use crate::text::list;

const AREA: &str = "devices";

/// Libraries by the prefix of their file names, and their purpose.
const LIBRARIES: [(&str, &str); 4] = [
    ("libcuda.so", "NVIDIA's driver, for the feature `cuda`"),
    ("libnvrtc.so", "compiles kernels for the feature `cuda`"),
    ("libnccl.so", "NVIDIA's collectives"),
    ("libvulkan.so", "the Vulkan loader, for the feature `wgpu`"),
];

pub fn devices(machine: &Machine, findings: &mut Findings) {
    let gpus = gpus(machine);
    let text = if gpus.is_empty() { "none found".into() } else { list(&gpus) };
    findings.fact(AREA, "GPUs", text, json!(gpus));
    let mut missing = Vec::new();
    let directories = directories(machine);
    for (library, purpose) in LIBRARIES {
        let found = directories.iter().find_map(|directory| {
            let file = machine.list(directory).into_iter().find(|file| file.starts_with(library))?;
            Some(format!("/{directory}/{file}"))
        });
        let text = found.clone().unwrap_or_else(|| format!("not found ({purpose})"));
        findings.fact(AREA, library.trim_end_matches(".so"), text, json!(found));
        if found.is_none() {
            missing.push(library);
        }
    }
    let drivers = vulkan_drivers(machine);
    let text = if drivers.is_empty() { "none (for the feature `wgpu`)".into() } else { list(&drivers) };
    findings.fact(AREA, "Vulkan drivers", text, json!(drivers));
    judge(&gpus, &missing, &drivers, findings);
}

fn judge(gpus: &[String], missing: &[&str], drivers: &[String], findings: &mut Findings) {
    if gpus.iter().any(|gpu| gpu.starts_with("NVIDIA")) && missing.contains(&"libcuda.so") {
        findings.warn(
            "there is an NVIDIA GPU, but its driver's library libcuda was not found",
            "install NVIDIA's driver; for a container: docker run --gpus all, with NVIDIA's container toolkit",
        );
    }
    if !gpus.is_empty() && drivers.is_empty() {
        findings.warn(
            "there is a GPU, but no Vulkan driver, which the feature `wgpu` needs to use it",
            "install one: mesa-vulkan-drivers for AMD and Intel, NVIDIA's driver for NVIDIA",
        );
    }
    if !drivers.is_empty() && missing.contains(&"libvulkan.so") {
        findings.warn("there are Vulkan drivers, but no loader libvulkan", "install it: Debian's libvulkan1");
    }
}

/// Display controllers on the PCI bus, including those without a driver.
fn gpus(machine: &Machine) -> Vec<String> {
    let gpu = |device: String| {
        let attribute = |name: &str| machine.read(&format!("sys/bus/pci/devices/{device}/{name}"));
        // Class 3 is display controllers: graphics cards, and GPUs without an output.
        if !attribute("class")?.starts_with("0x03") {
            return None;
        }
        let (vendor, model) = (attribute("vendor")?, attribute("device").unwrap_or_default());
        let maker = match vendor.as_str() {
            "0x10de" => "NVIDIA",
            "0x1002" => "AMD",
            "0x8086" => "Intel",
            // Virtual display adapters cannot compute.
            "0x1234" | "0x1af4" | "0x1b36" | "0x15ad" | "0x1013" => return None,
            other => other,
        };
        Some(format!("{maker} {model} at {device}"))
    };
    machine.list("sys/bus/pci/devices").into_iter().filter_map(gpu).collect()
}

/// Directories that the dynamic linker searches, as far as files show, without the leading slash.
fn directories(machine: &Machine) -> Vec<String> {
    let path = std::env::var("LD_LIBRARY_PATH").unwrap_or_default();
    let mut directories: Vec<String> =
        path.split(':').filter_map(|d| d.strip_prefix('/')).filter(|d| !d.is_empty()).map(str::to_owned).collect();
    for base in ["usr/lib", "lib"] {
        let machines = machine.list(base).into_iter().filter(|name| name.contains("-linux-"));
        directories.extend(machines.map(|name| format!("{base}/{name}")));
    }
    let usual = ["usr/lib64", "usr/lib", "lib64", "usr/local/lib", "usr/local/cuda/lib64", "usr/lib/wsl/lib"];
    directories.extend(usual.map(str::to_owned));
    directories
}

fn vulkan_drivers(machine: &Machine) -> Vec<String> {
    let directories = ["usr/share/vulkan/icd.d", "etc/vulkan/icd.d", "usr/local/share/vulkan/icd.d"];
    let files = directories.iter().flat_map(|directory| machine.list(directory));
    files.filter_map(|file| file.strip_suffix(".json").map(str::to_owned)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::machine::tests::root;

    #[test]
    fn devices_and_libraries_are_found_by_their_files() {
        let root = root(&[
            ("sys/bus/pci/devices/0000:01:00.0/vendor", "0x10de"),
            ("sys/bus/pci/devices/0000:01:00.0/class", "0x030200"),
            ("sys/bus/pci/devices/0000:01:00.0/device", "0x2335"),
            ("sys/bus/pci/devices/0000:02:00.0/vendor", "0x8086"),
            ("sys/bus/pci/devices/0000:02:00.0/class", "0x020000"),
            ("sys/bus/pci/devices/3/vendor", "0x1234"),
            ("sys/bus/pci/devices/3/class", "0x030000"),
            ("usr/lib/x86_64-linux-gnu/libnccl.so.2", ""),
            ("etc/vulkan/icd.d/nvidia_icd.json", "{}"),
        ]);
        let mut findings = Findings::default();
        devices(&Machine { root: root.path() }, &mut findings);
        let fact = |name: &str| findings.facts.iter().find(|fact| fact.name == name).unwrap().value.clone();
        assert_eq!(fact("GPUs"), json!(["NVIDIA 0x2335 at 0000:01:00.0"]));
        assert_eq!(fact("libnccl"), json!("/usr/lib/x86_64-linux-gnu/libnccl.so.2"));
        assert_eq!(fact("Vulkan drivers"), json!(["nvidia_icd"]));
        let problems: Vec<&str> = findings.problems.iter().map(|problem| problem.what.as_str()).collect();
        assert!(problems[0].contains("libcuda") && problems[1].contains("libvulkan") && problems.len() == 2);
    }

    #[test]
    fn a_machine_without_a_gpu_has_no_problem() {
        let mut findings = Findings::default();
        judge(&[], &["libcuda.so", "libvulkan.so"], &[], &mut findings);
        assert!(findings.problems.is_empty());
    }
}
