//! What every benchmark of this project shares.
//!
//! | module | what it does |
//! |---|---|
//! | [`args`] | the command line |
//! | [`grid`] | the cases of the FlashAttention papers and their FLOP count |
//! | [`device`] | the runtime that `FLASH_RUNTIME` names |
//! | [`inputs`] | random inputs on the host, the same for every series |
//! | [`subject`] | what is timed: our kernel, our op, Burn's own op |
//! | [`oracle`] | sampled rows of the f64 specification that an output must agree with |
//! | [`timing`] | batches of queued launches, and their median |
//! | [`worker`] | one child process per series, so that a case can be stopped |
//! | [`outcome`] | the result of one series on one case, and its JSON form |
//! | [`peers`] | what `anchors/peers.py` printed on the same machine |
//! | [`table`], [`plot`] | the report |
//!
//! Paths inside are relative (`super::`), so the test binary can include this directory with
//! `#[path]` and run the unit tests in it.

pub mod args;
pub mod device;
pub mod grid;
pub mod inputs;
pub mod oracle;
pub mod outcome;
pub mod peers;
pub mod plot;
pub mod subject;
pub mod table;
pub mod timing;
pub mod worker;
