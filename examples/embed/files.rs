//! The model directory's JSON files.

use std::path::Path;

use crate::{Failure, Outcome};

/// A JSON object together with the file it came from, for error messages.
pub struct Json {
    name: String,
    value: serde_json::Value,
}

impl Json {
    /// Reads the file `name` in `dir`.
    ///
    /// # Errors
    ///
    /// If it cannot be read or is not JSON.
    pub fn load(dir: &Path, name: &str) -> Outcome<Self> {
        let path = dir.join(name);
        let fail = |error: &dyn std::fmt::Display| format!("{}: {error}", path.display());
        let text = std::fs::read_to_string(&path).map_err(|error| fail(&error))?;
        let value = serde_json::from_str(&text).map_err(|error| fail(&error))?;
        let name = name.to_owned();
        Ok(Self { name, value })
    }

    /// The number under `key`.
    ///
    /// # Errors
    ///
    /// If there is none.
    pub fn number(&self, key: &str) -> Outcome<f64> {
        let number = self.value[key].as_f64();
        number.ok_or_else(|| self.fail(key, "a number"))
    }

    /// The non-negative integer under `key`.
    ///
    /// # Errors
    ///
    /// If there is none.
    pub fn size(&self, key: &str) -> Outcome<usize> {
        let number = self.value[key].as_u64();
        let size = number.and_then(|number| usize::try_from(number).ok());
        size.ok_or_else(|| self.fail(key, "a size"))
    }

    /// Checks that `key` holds `wanted`.
    ///
    /// # Errors
    ///
    /// If it holds something else or is absent.
    pub fn require(&self, key: &str, wanted: impl Into<serde_json::Value>) -> Outcome<()> {
        let wanted = wanted.into();
        if self.value[key] == wanted {
            return Ok(());
        }
        Err(self.fail(key, &wanted.to_string()))
    }

    fn fail(&self, key: &str, wanted: &str) -> Failure {
        let (name, found) = (&self.name, &self.value[key]);
        format!("{name}: {key} is {found}, this example needs {wanted}").into()
    }
}
