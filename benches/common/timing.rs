//! Timing by the host's clock around batches of queued launches.
//!
//! Launches are asynchronous, so a batch queues many and waits once at its end. The batch is so
//! long that the wait itself is under 2 % of it: the length asked for, or 50 idle waits,
//! whichever is longer. No time is subtracted. The median of the batches is the result.

use std::time::{Duration, Instant};

/// Timed batches per measurement.
const BATCHES: usize = 5;
/// The wait at the end of a batch may be one part in this many of it.
const BATCH_TO_WAIT: f64 = 50.0;
/// No batch queues more launches than this, however short they are.
const MOST_LAUNCHES: usize = 20_000;
/// The first launches of a batch meet an empty queue, so that none of them waits for the device.
const UNHINDERED: usize = 16;

/// What a measurement gave. Times are seconds per launch.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Timing {
    /// Median of the batches.
    pub median: f64,
    /// Fastest batch.
    pub fastest: f64,
    /// Slowest batch.
    pub slowest: f64,
    /// Launches in each batch.
    pub launches: usize,
    /// One wait on an idle device, in seconds.
    pub wait: f64,
    /// What the host takes to queue a launch: median of the batches.
    pub queue: f64,
}

/// Something whose launches can be queued and waited for.
pub trait Timed {
    /// Queues one launch.
    ///
    /// # Errors
    ///
    /// Why nothing was queued.
    fn launch(&mut self) -> Result<(), String>;

    /// Waits until everything queued has run.
    ///
    /// # Errors
    ///
    /// The device's fault.
    fn wait(&mut self) -> Result<(), String>;
}

/// Times `subject`, which has run at least once already (so that compilation and autotuning are
/// over), in batches of at least `batch`.
///
/// # Errors
///
/// The first error of a launch or a wait.
pub fn measure(subject: &mut impl Timed, batch: Duration) -> Result<Timing, String> {
    run_batch(subject, 1)?;
    let mut waits = Vec::with_capacity(BATCHES);
    for _ in 0..BATCHES {
        waits.push(run_batch(subject, 0)?.seconds);
    }
    let wait = median(&mut waits);
    let target = batch.as_secs_f64().max(BATCH_TO_WAIT * wait);
    let launches = launches_for(target, pilot(subject, target)?);

    let (mut seconds, mut queues) = (Vec::new(), Vec::new());
    for _ in 0..BATCHES {
        let batch = run_batch(subject, launches)?;
        seconds.push(batch.seconds / launches as f64);
        queues.push(batch.queue);
    }
    let middle = median(&mut seconds);
    Ok(Timing {
        median: middle,
        fastest: seconds[0],
        slowest: seconds[BATCHES - 1],
        launches,
        wait,
        queue: median(&mut queues),
    })
}

/// Seconds per launch, from batches that double until one is an eighth of `target`.
fn pilot(subject: &mut impl Timed, target: f64) -> Result<f64, String> {
    let mut launches = 1;
    loop {
        let seconds = run_batch(subject, launches)?.seconds;
        if seconds >= target / 8.0 || launches >= MOST_LAUNCHES {
            return Ok(seconds / launches as f64);
        }
        launches *= 2;
    }
}

fn launches_for(target: f64, seconds: f64) -> usize {
    ((target / seconds.max(1e-9)).ceil() as usize).clamp(1, MOST_LAUNCHES)
}

/// What a batch took.
struct Batch {
    /// All of it, in seconds.
    seconds: f64,
    /// Seconds to queue one of its first launches.
    queue: f64,
}

fn run_batch(subject: &mut impl Timed, launches: usize) -> Result<Batch, String> {
    let first = launches.min(UNHINDERED);
    let start = Instant::now();
    for _ in 0..first {
        subject.launch()?;
    }
    let queue = start.elapsed().as_secs_f64() / first.max(1) as f64;
    for _ in first..launches {
        subject.launch()?;
    }
    subject.wait()?;
    Ok(Batch {
        seconds: start.elapsed().as_secs_f64(),
        queue,
    })
}

/// Sorts `values` and gives the middle one.
fn median(values: &mut [f64]) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A device on which a launch costs nothing to queue and a fixed time to run.
    struct Queue {
        pending: u32,
        launched: usize,
        each: Duration,
    }

    impl Timed for Queue {
        fn launch(&mut self) -> Result<(), String> {
            self.pending += 1;
            self.launched += 1;
            Ok(())
        }

        fn wait(&mut self) -> Result<(), String> {
            std::thread::sleep(self.each * self.pending);
            self.pending = 0;
            Ok(())
        }
    }

    #[test]
    fn the_median_ignores_an_outlier() {
        assert_eq!(median(&mut [3.0, 900.0, 1.0, 2.0, 4.0]), 3.0);
    }

    #[test]
    fn a_batch_is_long_enough_and_not_endless() {
        assert_eq!(launches_for(0.2, 0.001), 200);
        assert_eq!(launches_for(0.2, 0.35), 1);
        assert_eq!(launches_for(0.2, 0.0), MOST_LAUNCHES);
    }

    #[test]
    fn queued_work_is_waited_for() {
        let each = Duration::from_millis(1);
        let mut queue = Queue {
            pending: 0,
            launched: 0,
            each,
        };
        let timing = measure(&mut queue, Duration::from_millis(8)).unwrap();
        assert_eq!(queue.pending, 0);
        assert!(timing.fastest >= each.as_secs_f64(), "{timing:?}");
        assert!(timing.fastest <= timing.median && timing.median <= timing.slowest);
        assert!(queue.launched > BATCHES * timing.launches);
        // To queue costs nothing there.
        assert!(timing.queue < timing.median / 2.0, "{timing:?}");
    }

    #[test]
    fn an_error_ends_the_measurement() {
        struct Broken;
        impl Timed for Broken {
            fn launch(&mut self) -> Result<(), String> {
                Err("no device".into())
            }
            fn wait(&mut self) -> Result<(), String> {
                Ok(())
            }
        }
        let result = measure(&mut Broken, Duration::from_millis(1));
        assert_eq!(result, Err("no device".to_owned()));
    }
}
