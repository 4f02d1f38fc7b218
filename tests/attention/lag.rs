//! How far warpgroups of a cube may be apart.

use flash_kernels::{
    Causality::{Causal, Full},
    FloatKind::F16,
};

use crate::codegen::plans::{Ask, HOPPER};

/// A warpgroup that is done with its keys waits for the next queries, which come after the last values
/// of this tile: with as many tiles still to pass as there are stages the cube stood still.
#[test]
fn a_warpgroup_that_is_done_early_leaves_a_stage() {
    for head_dim in [40, 64, 128, 192, 256] {
        for seqlen in [128, 256, 1024, 2048, 4096, 16_384] {
            let ask = Ask {
                causality: Causal,
                seqlen,
                ..Ask::new(F16, head_dim)
            };
            let plan = ask.plan(&HOPPER).expect("a plan");
            assert!(plan.lag() < plan.stages(), "{plan:?}");
        }
    }
    let with = |causality| {
        let ask = Ask {
            causality,
            ..Ask::new(F16, 128)
        };
        let mut plan = ask.plan(&HOPPER).expect("a plan");
        (plan.tile.block_m, plan.tile.block_n) = (256, 64);
        plan.threads = 128 * (plan.consumers() + 1);
        plan
    };
    assert_eq!((with(Causal).lag(), with(Causal).stages()), (3, 3));
    assert_eq!(with(Full).check(&HOPPER), Ok(()));
    let refusal = with(Causal)
        .check(&HOPPER)
        .expect_err("it would wait forever");
    let refusal = refusal.to_string();
    assert!(refusal.contains("block_n is 64"), "{refusal}");
    assert!(refusal.contains("fewer than 3 tiles"), "{refusal}");
}
