//! The generator against the numbers that others publish and that results were recorded with.

use flash_reference::rng::Rng;

/// The first values that the reference code of SplitMix64 gives for this seed.
#[test]
fn bits_are_those_of_splitmix64() {
    let mut rng = Rng::new(1_234_567);
    let bits = [(); 3].map(|()| rng.next_u64());
    let expected: [u64; 3] = [
        6_457_827_717_110_365_317,
        3_203_168_211_198_807_973,
        9_817_491_932_198_370_423,
    ];
    assert_eq!(bits, expected);
}

/// Recorded losses are of batches that such numbers cut from the text.
#[test]
fn streams_stay_what_results_were_recorded_with() {
    let mut rng = Rng::stream(1, 2);
    assert_eq!([(); 3].map(|()| rng.below(1000)), [507, 88, 854]);
}

#[test]
fn normals_come_in_pairs_and_the_last_may_be_cut() {
    let mut rng = Rng::new(5);
    let pairs = [rng.normal_pair(), rng.normal_pair()].concat();
    assert_eq!(Rng::new(5).normals(4), pairs);
    assert_eq!(Rng::new(5).normals(3), pairs[..3]);
    assert!(Rng::new(5).normals(0).is_empty());
}
