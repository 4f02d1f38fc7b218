//! A Vulkan loader and driver, which WGPU runs on under Linux; other systems bring their own API.

use std::env;
use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};

use xshell::Shell;

use super::system::{self, Packages};
use crate::Result;

/// Mesa's drivers, among them lavapipe, which runs on the CPU.
const MESA: Packages = Packages {
    apt: &["mesa-vulkan-drivers", "libvulkan1"],
    dnf: &["mesa-vulkan-drivers", "vulkan-loader"],
    pacman: &["vulkan-swrast", "vulkan-icd-loader"],
};

/// What the driver will be given.
#[derive(Clone, Copy, PartialEq)]
pub enum Language {
    /// WGSL through naga.
    Wgsl,
    /// CubeCL's own SPIR-V.
    Spirv,
}

/// What a machine has of Vulkan.
#[derive(Debug, Default)]
struct Survey {
    gpu: Option<PathBuf>,
    loader: Option<PathBuf>,
    drivers: Vec<PathBuf>,
}

#[derive(Debug, PartialEq)]
enum Verdict {
    Ready,
    InstallMesa,
    NeedsVendorDriver,
}

/// Sees to it that there is a driver that can run here.
///
/// # Errors
/// When there is none and it cannot be installed from here: the message says how to.
pub fn ensure(sh: &Shell, language: Language) -> Result<()> {
    if !cfg!(target_os = "linux") {
        println!("vulkan: not needed, WGPU uses this system's own graphics API");
        return Ok(());
    }
    if env::var_os("XDG_RUNTIME_DIR").is_none() {
        // Without a desktop session it is unset, and each program that opens a device would print
        // an error about it, though none of them opens a window.
        sh.set_var("XDG_RUNTIME_DIR", env::temp_dir());
    }
    let mut survey = Survey::take();
    if survey.verdict() == Verdict::InstallMesa {
        system::install(sh, &MESA, "a Vulkan driver for the CPU (Mesa's lavapipe)")?;
        survey = Survey::take();
    }
    match survey.verdict() {
        Verdict::Ready => {}
        Verdict::InstallMesa => return Err(format!("no Vulkan driver after {survey:?}").into()),
        Verdict::NeedsVendorDriver => return Err(survey.vendor_driver_missing().into()),
    }
    if language == Language::Spirv && survey.gpu.is_none() {
        // Mesa 22.3.6 (Debian 12) ends in a segmentation fault at the first such kernel.
        println!("vulkan: no GPU here, and lavapipe may crash on SPIR-V; wgpu runs everywhere");
    }
    println!("vulkan: {}", survey.summary());
    Ok(())
}

impl Survey {
    fn take() -> Self {
        let variable = |name: &str| env::var_os(name);
        Self {
            gpu: gpu(),
            loader: loader(variable),
            drivers: drivers(variable),
        }
    }

    /// The drivers that may find a device: those of GPUs come in one package, and without a GPU
    /// only one for the CPU counts.
    fn usable(&self) -> impl Iterator<Item = &PathBuf> {
        let drivers = self.drivers.iter();
        drivers.filter(|driver| self.gpu.is_some() || is_software(driver))
    }

    fn verdict(&self) -> Verdict {
        let works = self.loader.is_some() && self.usable().next().is_some();
        match (works, &self.gpu) {
            (true, _) => Verdict::Ready,
            (false, None) => Verdict::InstallMesa,
            (false, Some(_)) => Verdict::NeedsVendorDriver,
        }
    }

    fn summary(&self) -> String {
        let names = self.usable().filter_map(|path| path.file_stem());
        let names: Vec<_> = names.map(|name| name.to_string_lossy()).collect();
        let gpu = match &self.gpu {
            Some(device) => format!("GPU {}", device.display()),
            None => "no GPU, runs on the CPU".to_owned(),
        };
        format!("{gpu}; drivers {}", names.join(", "))
    }

    fn vendor_driver_missing(&self) -> String {
        let gpu = self.gpu.as_deref().unwrap_or(Path::new("none")).display();
        let missing = match self.loader {
            Some(_) => "no driver file in any vulkan/icd.d directory",
            None => "no libvulkan.so.1",
        };
        let packages = MESA.apt.join(" ");
        format!(
            "a GPU is here ({gpu}) but {missing}: install its vendor's Vulkan driver. For AMD and \
             Intel, and to run on the CPU, Debian's packages {packages} do"
        )
    }
}

fn gpu() -> Option<PathBuf> {
    let fixed = ["/dev/nvidiactl", "/dev/kfd", "/dev/dxg"];
    let rendering = listing(Path::new("/dev/dri"), "renderD", "");
    let mut fixed = fixed.iter().map(PathBuf::from);
    fixed
        .find(|path| path.exists())
        .or_else(|| rendering.into_iter().next())
}

fn loader(variable: impl Fn(&str) -> Option<OsString>) -> Option<PathBuf> {
    let set = variable("LD_LIBRARY_PATH").unwrap_or_default();
    let arch = format!("/usr/lib/{}-linux-gnu", env::consts::ARCH);
    let usual = [
        &arch,
        "/usr/lib64",
        "/usr/lib",
        "/usr/local/lib",
        "/lib64",
        "/lib",
    ];
    env::split_paths(&set)
        .chain(usual.iter().map(PathBuf::from))
        .map(|dir| dir.join("libvulkan.so.1"))
        .find(|path| path.exists())
}

/// The driver files that the loader would read, in its documented search order.
fn drivers(variable: impl Fn(&str) -> Option<OsString>) -> Vec<PathBuf> {
    let forced = variable("VK_DRIVER_FILES").or_else(|| variable("VK_ICD_FILENAMES"));
    if let Some(forced) = forced {
        return env::split_paths(&forced).flat_map(files_at).collect();
    }
    let added = variable("VK_ADD_DRIVER_FILES").unwrap_or_default();
    let added: Vec<_> = env::split_paths(&added).collect();
    let found = icd_dirs(variable).into_iter();
    added.into_iter().chain(found).flat_map(files_at).collect()
}

fn icd_dirs(variable: impl Fn(&str) -> Option<OsString>) -> Vec<PathBuf> {
    let home = variable("HOME").map(PathBuf::from);
    let or_home = |name: &str, below: &str| {
        let set = variable(name).map(PathBuf::from);
        set.or_else(|| home.as_ref().map(|home| home.join(below)))
    };
    let system = variable("XDG_DATA_DIRS").unwrap_or_else(|| "/usr/local/share:/usr/share".into());
    let mut bases: Vec<PathBuf> = or_home("XDG_CONFIG_HOME", ".config").into_iter().collect();
    bases.extend(["/etc/xdg", "/usr/local/etc", "/etc"].map(PathBuf::from));
    bases.extend(or_home("XDG_DATA_HOME", ".local/share"));
    bases.extend(env::split_paths(&system));
    bases.iter().map(|base| base.join("vulkan/icd.d")).collect()
}

fn files_at(path: PathBuf) -> Vec<PathBuf> {
    if path.is_file() {
        vec![path]
    } else {
        listing(&path, "", ".json")
    }
}

fn listing(dir: &Path, start: &str, end: &str) -> Vec<PathBuf> {
    let entries = fs::read_dir(dir).into_iter().flatten().flatten();
    let mut paths: Vec<_> = entries
        .filter(|entry| {
            let name = entry.file_name();
            let name = name.to_string_lossy();
            name.starts_with(start) && name.ends_with(end)
        })
        .map(|entry| entry.path())
        .collect();
    paths.sort();
    paths
}

fn is_software(driver: &Path) -> bool {
    let name = driver.file_name().unwrap_or_default().to_string_lossy();
    ["lvp", "swiftshader", "swrast"]
        .iter()
        .any(|known| name.contains(known))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn survey(gpu: &str, loader: &str, drivers: &[&str]) -> Survey {
        let some = |text: &str| (!text.is_empty()).then(|| PathBuf::from(text));
        Survey {
            gpu: some(gpu),
            loader: some(loader),
            drivers: drivers.iter().map(PathBuf::from).collect(),
        }
    }

    #[test]
    fn without_a_gpu_only_a_driver_for_the_cpu_counts() {
        let only_gpus = ["radeon_icd.x86_64.json", "nvidia_icd.json"];
        assert_eq!(survey("", "l", &only_gpus).verdict(), Verdict::InstallMesa);
        let software = ["radeon_icd.x86_64.json", "lvp_icd.x86_64.json"];
        let ready = survey("", "l", &software);
        assert_eq!(ready.verdict(), Verdict::Ready);
        assert!(ready.summary().ends_with("drivers lvp_icd.x86_64"));
        assert_eq!(survey("", "", &software).verdict(), Verdict::InstallMesa);
        assert_eq!(Survey::default().verdict(), Verdict::InstallMesa);
    }

    #[test]
    fn with_a_gpu_nothing_is_installed() {
        let bare = survey("gpu0", "", &[]);
        assert_eq!(bare.verdict(), Verdict::NeedsVendorDriver);
        assert!(bare.vendor_driver_missing().contains("no libvulkan.so.1"));
        let ready = survey("gpu0", "l", &["nvidia_icd.json"]);
        assert_eq!(ready.verdict(), Verdict::Ready);
        assert!(ready.summary().contains("drivers nvidia_icd"));
    }

    #[test]
    fn driver_files_are_found_where_the_loader_looks() {
        let base = env::temp_dir().join(format!("xtask-icd-{}", std::process::id()));
        let dir = base.join("vulkan/icd.d");
        fs::create_dir_all(&dir).unwrap();
        let file = dir.join("lvp_icd.json");
        fs::write(&file, "{}").unwrap();
        fs::write(dir.join("readme.txt"), "").unwrap();
        let only = |name: &'static str, value: &Path| {
            let value = value.as_os_str().to_owned();
            move |asked: &str| (asked == name).then(|| value.clone())
        };
        let found = std::slice::from_ref(&file);
        assert_eq!(drivers(only("VK_DRIVER_FILES", &dir)), found);
        assert_eq!(drivers(only("VK_ICD_FILENAMES", &file)), found);
        assert!(drivers(only("XDG_DATA_DIRS", &base)).contains(&file));
        assert!(drivers(only("VK_ADD_DRIVER_FILES", &file)).contains(&file));
        let gone = base.join("nothing");
        assert!(drivers(only("VK_DRIVER_FILES", &gone)).is_empty());
        fs::remove_dir_all(&base).unwrap();
    }
}
