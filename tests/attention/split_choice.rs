//! How many parts keys are dealt out in: decided by shape and device alone.

use flash_kernels::{
    DeviceClass,
    FloatKind::{self, F16, F32},
    Pass, Plan, UnitKind,
};
use rstest::rstest;

use crate::codegen::plans::{AMPERE, Ask, HOPPER, VULKAN, WEBGPU, WGSL_PLANES};

/// The plan for eight heads of `queries` queries and `keys` keys.
fn plan(device: &DeviceClass, dtype: FloatKind, queries: usize, keys: usize) -> Plan {
    let ask = Ask {
        queries: Some(queries),
        seqlen: keys,
        splits: None,
        ..Ask::new(dtype, 128)
    };
    ask.plan(device).expect("a plan")
}

/// A Hopper whose warpgroup products are out of reach, as with rows of an odd length.
const PLAIN_HOPPER: DeviceClass = DeviceClass {
    wgmma: false,
    ..HOPPER
};

#[rstest]
#[case::few_keys(1, 300, 1)]
#[case::two_parts(1, 512, 2)]
#[case::long(1, 16_384, 49)]
#[case::as_many_as_run_at_once(1, 1 << 20, 49)]
#[case::a_tile_of_queries(64, 8192, 32)]
#[case::eight_tiles(1024, 4096, 4)]
#[case::half_of_the_processors(1056, 4096, 1)]
#[case::more_queries(4096, 4096, 1)]
fn parts_fill_the_processors(#[case] queries: usize, #[case] keys: usize, #[case] splits: usize) {
    assert_eq!(plan(&PLAIN_HOPPER, F16, queries, keys).splits, splits);
}

/// No more parts than can run at the same time, none without work, and none where tiles suffice.
#[rstest]
fn parts_are_neither_too_many_nor_too_short(
    #[values(HOPPER, PLAIN_HOPPER, AMPERE)] device: DeviceClass,
    #[values(F16, F32)] dtype: FloatKind,
) {
    let lengths = [
        1, 2, 16, 17, 64, 100, 255, 256, 511, 512, 1000, 5000, 70_000,
    ];
    for queries in lengths {
        for keys in lengths {
            let plan = plan(&device, dtype, queries, keys);
            let tiles = 8 * queries.div_ceil(plan.tile.block_m);
            let at_once = device.processors * (device.shared_bytes / plan.shared_bytes());
            assert_eq!(plan.check(&device), Ok(()));
            assert!(plan.splits >= 1, "{plan:?}");
            if plan.splits > 1 {
                assert!(tiles * plan.splits <= at_once, "{tiles} of {plan:?}");
                assert!(2 * tiles <= device.processors, "{tiles} of {plan:?}");
                assert!(plan.splits * 256 <= keys, "{keys} keys in {plan:?}");
            }
        }
    }
}

/// Where the number of processors is not known, keys are walked in one.
#[rstest]
fn unknown_devices_do_not_split(#[values(VULKAN, WGSL_PLANES, WEBGPU)] device: DeviceClass) {
    for queries in [1, 64, 1024] {
        assert_eq!(plan(&device, F32, queries, 100_000).splits, 1);
    }
}

/// One query is a waste of a warpgroup's 64 rows; from 17 on warpgroups are as fast, a cube to a
/// processor.
#[rstest]
#[case::one_query(1, 16_384, UnitKind::Mma, 49)]
#[case::a_tile(128, 16_384, UnitKind::Wgmma, 16)]
#[case::five_tiles(640, 16_384, UnitKind::Wgmma, 3)]
#[case::nine_tiles(1152, 16_384, UnitKind::Wgmma, 1)]
#[case::few_keys(128, 512, UnitKind::Wgmma, 2)]
#[case::long(16_384, 16_384, UnitKind::Wgmma, 1)]
fn units_by_queries(
    #[case] queries: usize,
    #[case] keys: usize,
    #[case] unit: UnitKind,
    #[case] splits: usize,
) {
    let plan = plan(&HOPPER, F16, queries, keys);
    assert_eq!((plan.unit, plan.splits), (unit, splits));
}

/// A new number of parts is no new kernel, but one part and many are two.
#[test]
fn kernels_do_not_depend_on_the_number_of_parts() {
    let whole = plan(&HOPPER, F32, 1000, 1000);
    let of = |splits| Plan { splits, ..whole }.compiled();
    assert_eq!(of(2), of(50));
    assert_ne!(of(1), of(2));
    assert_eq!(of(1), whole);
}

#[rstest]
#[case::no_part(WGSL_PLANES, F32, Pass::Forward, 0)]
#[case::gradient(WGSL_PLANES, F32, Pass::Dq, 2)]
fn what_cannot_be_split_is_refused_by_name(
    #[case] device: DeviceClass,
    #[case] dtype: FloatKind,
    #[case] pass: Pass,
    #[case] splits: usize,
) {
    let ask = Ask {
        pass,
        ..Ask::new(dtype, 64)
    };
    let whole = ask.plan(&device).expect("a plan");
    assert_eq!((whole.splits, whole.check(&device)), (1, Ok(())));
    let refusal = Plan { splits, ..whole }.check(&device);
    let said = refusal.expect_err("it cannot").to_string();
    assert!(said.contains(&format!("splits is {splits}")), "{said}");
}
