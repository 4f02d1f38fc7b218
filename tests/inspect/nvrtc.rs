//! CUDA C++ to PTX by NVRTC, the compiler that CUDA programs carry, as CubeCL calls it.

use std::{
    ffi::{CStr, CString, c_char, c_int, c_void},
    path::Path,
    ptr::{null, null_mut},
};

use libloading::Library;

type Program = *mut c_void;
type Create = unsafe extern "C" fn(
    *mut Program,
    *const c_char,
    *const c_char,
    c_int,
    *const *const c_char,
    *const *const c_char,
) -> c_int;
type Compile = unsafe extern "C" fn(Program, c_int, *const *const c_char) -> c_int;
type Size = unsafe extern "C" fn(Program, *mut usize) -> c_int;
type Text = unsafe extern "C" fn(Program, *mut c_char) -> c_int;
type Destroy = unsafe extern "C" fn(*mut Program) -> c_int;
type Name = unsafe extern "C" fn(c_int) -> *const c_char;

/// NVRTC of a CUDA tree.
pub struct Nvrtc {
    create: Create,
    compile: Compile,
    log: (Size, Text),
    ptx: (Size, Text),
    destroy: Destroy,
    name: Name,
    includes: [String; 2],
    /// Keeps the functions above mapped.
    _library: Library,
}

impl Nvrtc {
    /// The one in `tools` (`lib`, `include`).
    ///
    /// # Errors
    ///
    /// When the library cannot be opened or lacks a function.
    pub fn open(tools: &Path) -> Result<Self, String> {
        let path = tools.join("lib/libnvrtc.so.13");
        let include = tools.join("include");
        // SAFETY: NVRTC's initializers have no requirements.
        let library = unsafe { Library::new(&path) }.map_err(|e| e.to_string())?;
        // SAFETY: the types are those of nvrtc.h, and the library outlives the copies.
        unsafe {
            Ok(Self {
                create: function(&library, c"nvrtcCreateProgram")?,
                compile: function(&library, c"nvrtcCompileProgram")?,
                log: (
                    function(&library, c"nvrtcGetProgramLogSize")?,
                    function(&library, c"nvrtcGetProgramLog")?,
                ),
                ptx: (
                    function(&library, c"nvrtcGetPTXSize")?,
                    function(&library, c"nvrtcGetPTX")?,
                ),
                destroy: function(&library, c"nvrtcDestroyProgram")?,
                name: function(&library, c"nvrtcGetErrorString")?,
                includes: [include.clone(), include.join("cccl")]
                    .map(|dir| format!("--include-path={}", dir.display())),
                _library: library,
            })
        }
    }

    /// The PTX of `source` for `arch` (`sm_80`, `sm_90a`).
    ///
    /// # Errors
    ///
    /// The compiler's log.
    pub fn ptx(&self, source: &str, arch: &str) -> Result<String, String> {
        let source = CString::new(source).map_err(|e| e.to_string())?;
        let mut options = vec![format!("--gpu-architecture={arch}"), "-lineinfo".to_owned()];
        options.extend(self.includes.clone());
        let options: Vec<_> = options
            .into_iter()
            .map(|option| CString::new(option).map_err(|e| e.to_string()))
            .collect::<Result<_, _>>()?;
        let pointers: Vec<_> = options.iter().map(|option| option.as_ptr()).collect();
        let mut program = null_mut();
        // SAFETY: strings end in 0 and live until the call returns; the program is destroyed once.
        unsafe {
            let made = (self.create)(&mut program, source.as_ptr(), null(), 0, null(), null());
            self.check(made)?;
            let count = pointers.len() as c_int;
            let compiled = (self.compile)(program, count, pointers.as_ptr());
            let result = match self.check(compiled) {
                Ok(()) => self.text(program, self.ptx),
                Err(error) => Err(format!("{error}\n{}", self.text(program, self.log)?)),
            };
            self.check((self.destroy)(&mut program))?;
            result
        }
    }

    /// # Safety
    ///
    /// `program` must be alive, and the functions those of one kind of text.
    unsafe fn text(&self, program: Program, (size, text): (Size, Text)) -> Result<String, String> {
        let mut length = 0;
        // SAFETY: the buffer is as long as NVRTC says, its final 0 included.
        let buffer = unsafe {
            self.check(size(program, &mut length))?;
            let mut buffer = vec![0u8; length];
            self.check(text(program, buffer.as_mut_ptr().cast()))?;
            buffer
        };
        let text = CStr::from_bytes_until_nul(&buffer).map_err(|e| e.to_string())?;
        Ok(text.to_string_lossy().into_owned())
    }

    fn check(&self, status: c_int) -> Result<(), String> {
        if status == 0 {
            return Ok(());
        }
        // SAFETY: the string is static, and there is one for every status.
        let name = unsafe { CStr::from_ptr((self.name)(status)) };
        Err(name.to_string_lossy().into_owned())
    }
}

/// # Safety
///
/// `F` must be the type of the function `name`, and not be called after `library` is dropped.
unsafe fn function<F: Copy>(library: &Library, name: &CStr) -> Result<F, String> {
    // SAFETY: the caller's.
    let symbol = unsafe { library.get::<F>(name.to_bytes_with_nul()) };
    symbol.map(|symbol| *symbol).map_err(|e| e.to_string())
}
