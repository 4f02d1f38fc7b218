//! Why an attention cannot be computed as asked.

use core::fmt::{self, Display};

/// An argument that attention refuses, or a device that cannot run a kernel for it.
///
/// Every variant names the argument, the value it had and what is allowed.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum AttentionError {
    /// A caller's argument is out of range or disagrees with another one.
    Argument {
        /// The argument, as the public function names it.
        argument: &'static str,
        /// The value it had.
        value: String,
        /// What would have been accepted.
        allowed: String,
    },
    /// The device lacks what every plan of the table needs.
    Device {
        /// What is missing, e.g. `shared memory`.
        resource: &'static str,
        /// What the device has.
        value: String,
        /// What the smallest plan needs.
        allowed: String,
    },
    /// The device refused or failed a launch.
    Launch {
        /// The runtime's own message.
        message: String,
    },
}

impl AttentionError {
    /// A refused argument.
    pub fn new(argument: &'static str, value: impl Display, allowed: impl Display) -> Self {
        Self::Argument {
            argument,
            value: value.to_string(),
            allowed: allowed.to_string(),
        }
    }

    /// A device without what a plan needs.
    pub(crate) fn device(
        resource: &'static str,
        value: impl Display,
        allowed: impl Display,
    ) -> Self {
        Self::Device {
            resource,
            value: value.to_string(),
            allowed: allowed.to_string(),
        }
    }

    /// A launch that the runtime refused.
    pub fn launch(message: impl Display) -> Self {
        Self::Launch {
            message: message.to_string(),
        }
    }
}

impl Display for AttentionError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Argument {
                argument,
                value,
                allowed,
            } => write!(f, "attention: {argument} is {value}, allowed: {allowed}"),
            Self::Device {
                resource,
                value,
                allowed,
            } => write!(
                f,
                "attention: the device's {resource} is {value}, needed: {allowed}"
            ),
            Self::Launch { message } => write!(f, "attention: launch failed: {message}"),
        }
    }
}

impl std::error::Error for AttentionError {}
