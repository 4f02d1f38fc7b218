//! The specification against the textbook formula, finite differences and known numbers.

mod case;
mod forward;
mod gradients;
mod plain;
mod rng;
mod rounding;
mod visibility;
