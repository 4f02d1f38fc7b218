//! What every benchmark of this project shares.
//!
//! | module | what it does |
//! |---|---|
//! | [`args`], [`choice`] | the command line |
//! | [`grid`] | the cases of the FlashAttention papers and their FLOP count |
//! | [`device`] | the runtime that `FLASH_RUNTIME` names |
//! | [`inputs`] | random inputs on the host, the same for every series |
//! | [`subject`] | what is timed: our kernel, our op, Burn's own op |
//! | [`gradient`] | the same for the backward pass |
//! | [`oracle`] | sampled rows of the f64 specification that an output must agree with |
//! | [`gradient_oracle`], [`gradient_rows`] | the same for gradients |
//! | [`run`] | the grid, in children or in this process |
//! | [`timing`] | batches of queued launches, and their median |
//! | [`step`] | a training step, and the memory that it needs |
//! | [`memory_args`], [`memory_report`] | command line and report of the memory benchmark |
//! | [`worker`] | one child process per series, so that a case can be stopped |
//! | [`outcome`], [`date`] | the result of one series on one case, and its JSON form |
//! | [`peers`] | what `anchors/peers.py` printed on the same machine |
//! | [`table`], [`note`], [`plot`] | the report |
//!
//! Paths inside are relative (`super::`), so the test binary can include this directory with
//! `#[path]` and run the unit tests in it.

pub mod args;
pub mod choice;
pub mod date;
pub mod device;
pub mod gradient;
pub mod gradient_oracle;
pub mod gradient_rows;
pub mod grid;
pub mod inputs;
pub mod memory_args;
pub mod memory_report;
pub mod note;
pub mod oracle;
pub mod outcome;
pub mod peers;
pub mod plot;
pub mod run;
pub mod step;
pub mod subject;
pub mod table;
pub mod timing;
pub mod worker;
