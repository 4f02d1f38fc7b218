//! Keys dealt out to several cubes, and their parts merged: the same answer as in one walk.
//!
//! Whether a device splits by itself depends on its size, so each test says how many parts it wants.

use burn::tensor::{Tensor, TensorData};
use burn_flash_attention::{AttentionPath, AttentionReport, FlashOutput};
use cubecl::client::Client;
use flash_kernels::{
    AttentionProblem, AttentionShape, DeviceClass, FloatKind, ForwardOutput, MaskKind, MaskView,
    Masking, Pass, Plan, Precision, TensorView,
    launch::forward_with,
    select::{Alignment, select, widest},
};
use flash_reference::Causality::{self, Causal, Full};
use flash_reference::rounding::Dtype::{self, Bf16, F16, F32, Tf32};
use half::{bf16, f16};
use rstest::rstest;

use crate::problem::{Got, Problem};
use crate::runtime;
use crate::support::{Dims, Host, dims};

/// How q, k and v lie in memory.
#[derive(Clone, Copy, Debug)]
enum Layout {
    /// `[batch, heads, seqlen, dim]`.
    Packed,
    /// `[batch, seqlen, heads, dim]`, the heads of a token side by side.
    ByToken,
}

fn kind(dtype: Dtype) -> FloatKind {
    match dtype {
        F32 | Tf32 => FloatKind::F32,
        F16 => FloatKind::F16,
        Bf16 => FloatKind::Bf16,
    }
}

fn encode(dtype: Dtype, x: f64) -> Vec<u8> {
    match dtype {
        F32 | Tf32 => (x as f32).to_le_bytes().to_vec(),
        F16 => f16::from_f64(x).to_le_bytes().to_vec(),
        Bf16 => bf16::from_f64(x).to_le_bytes().to_vec(),
    }
}

/// A buffer of `bytes`, or of one element where there is none to bind.
fn buffer(client: &Client, mut bytes: Vec<u8>) -> cubecl::server::Handle {
    bytes.resize(bytes.len().max(4), 0);
    client.create_from_slice(&bytes)
}

fn upload(
    client: &Client,
    dtype: Dtype,
    shape: [usize; 4],
    values: &[f64],
    layout: Layout,
) -> TensorView {
    let [batch, heads, seqlen, dim] = shape;
    let (values, strides) = match layout {
        Layout::Packed => (
            values.to_vec(),
            [heads * seqlen * dim, seqlen * dim, dim, 1],
        ),
        Layout::ByToken => {
            let at = |[b, s, h, d]: [usize; 4]| ((b * heads + h) * seqlen + s) * dim + d;
            let moved = Host::from_fn([batch, seqlen, heads, dim], |index| values[at(index)]);
            (moved.data, [seqlen * heads * dim, dim, heads * dim, 1])
        }
    };
    let bytes = values.iter().flat_map(|&x| encode(dtype, x)).collect();
    TensorView {
        handle: buffer(client, bytes),
        shape,
        strides,
    }
}

fn upload_mask(client: &Client, mask: &Host<bool>, scores: [usize; 4]) -> MaskView {
    let bools = mask.data.iter().map(|&drop| u32::from(drop));
    let mut tensor = TensorView::packed(
        buffer(client, bools.flat_map(u32::to_le_bytes).collect()),
        mask.shape,
    );
    for d in 0..4 {
        if tensor.shape[d] == 1 {
            tensor.strides[d] = 0;
        }
    }
    tensor.shape = scores;
    let kind = MaskKind::U32;
    MaskView { tensor, kind }
}

/// What the kernels are asked for.
fn question(problem: &Problem) -> AttentionProblem {
    let dims = problem.dims;
    AttentionProblem {
        shape: AttentionShape::new(dims.q(), dims.k(), dims.v()).expect("they agree"),
        dtype: kind(problem.dtype),
        causality: match problem.spec.causality {
            Full => flash_kernels::Causality::Full,
            Causal => flash_kernels::Causality::Causal,
        },
        masking: match problem.mask {
            Some(_) => Masking::Dense,
            None => Masking::None,
        },
        scale: problem.spec.scale as f32,
        precision: match problem.dtype {
            Tf32 => Precision::Tf32,
            F32 | F16 | Bf16 => Precision::Full,
        },
    }
}

/// The plans that the device under test and one without warpgroup products get, in `splits` parts.
fn plans(client: &Client, question: &AttentionProblem, splits: usize) -> Vec<Plan> {
    let device = DeviceClass::of(client);
    let shape = &question.shape;
    let align = Alignment(widest(shape.head_dim, 8).min(widest(shape.val_dim, 8)));
    let plan = |wgmma| {
        let device = DeviceClass { wgmma, ..device };
        let plan = select(&device, question, Pass::Forward, align).expect("a plan");
        Plan { splits, ..plan }
    };
    let mut plans = vec![plan(device.wgmma), plan(false)];
    plans.dedup();
    plans
}

/// The bytes of output and log-sum-exp of `problem` by `plan`.
fn run(client: &Client, problem: &Problem, plan: &Plan, layout: Layout) -> [Vec<u8>; 2] {
    let dims = problem.dims;
    let upload = |shape, values| upload(client, problem.dtype, shape, values, layout);
    let q = upload(dims.q(), &problem.q);
    let k = upload(dims.k(), &problem.k);
    let v = upload(dims.v(), &problem.v);
    let mask = problem.mask.as_ref();
    let mask = mask.map(|mask| upload_mask(client, mask, dims.scores()));
    let output = forward_with(client, &question(problem), plan, &q, &k, &v, mask.as_ref());
    let ForwardOutput { out, lse } =
        output.unwrap_or_else(|error| panic!("{error}\n  {}", problem.describe()));
    [out, lse].map(|view| {
        let read = client.read_one(view.handle);
        read.expect("the launch succeeded").to_vec()
    })
}

/// The device's client, if there are kernels and it holds `problem`'s dtype, which it must refuse
/// otherwise.
#[track_caller]
fn client_for(problem: &Problem) -> Option<Client> {
    let client = runtime::client();
    if client.is_none() {
        assert_eq!(runtime::current(), runtime::Runtime::Flex);
    }
    client.filter(|_| !problem.is_refused())
}

/// Runs `problem` in `splits` parts and asserts the rule on output and LSE, for each plan.
#[track_caller]
fn check_in(problem: &Problem, splits: usize, layout: Layout) -> Option<Got> {
    let client = client_for(problem)?;
    let device = runtime::device();
    let dtypes = [problem.dtype, F32].map(runtime::burn_dtype);
    let mut got = None;
    for plan in plans(&client, &question(problem), splits) {
        let [out, lse] = run(&client, problem, &plan, layout);
        let out = TensorData::from_bytes_vec(out, problem.dims.out(), dtypes[0]);
        let out = Tensor::from_data(out, (&device, dtypes[0]));
        let lse = TensorData::from_bytes_vec(lse, problem.dims.lse(), dtypes[1]);
        let lse = Tensor::from_data(lse, (&device, dtypes[1]));
        let report = AttentionReport {
            path: AttentionPath::Kernel(plan.unit),
            plan: Some(plan),
            gradient: None,
            precision: Some(plan.precision),
            reason: None,
        };
        let lse = Some(lse);
        got = Some(problem.check_output(FlashOutput { out, lse, report }));
    }
    got
}

#[track_caller]
fn check(problem: &Problem, splits: usize) -> Option<Got> {
    check_in(problem, splits, Layout::Packed)
}

/// Of 5 to 42 key tiles: even and uneven parts, and one of more parts than there are tiles.
#[rstest]
fn any_number_of_parts(
    #[values(1, 7, 64, 150)] seqlen_q: usize,
    #[values(Full, Causal)] causality: Causality,
    #[values(F32, F16, Bf16)] dtype: Dtype,
) {
    let problem = Problem::random(dtype, dims(1, 2, seqlen_q, 333, 64)).causality(causality);
    for splits in [2, 3, 5, 50] {
        check(&problem, splits);
    }
}

/// The last tile has every size, and whichever part it falls to.
#[rstest]
#[case::f32(F32, 8)]
#[case::tf32(Tf32, 128)]
#[case::f16(F16, 64)]
#[case::bf16(Bf16, 128)]
fn a_tail_of_every_length(#[case] dtype: Dtype, #[case] head_dim: usize) {
    for seqlen_k in (1..=66).chain([127, 128, 129, 191, 193]) {
        let problem = Problem::random(dtype, dims(1, 2, 3, seqlen_k, head_dim));
        check(&problem, 3);
        check(&problem.causal(), 2);
    }
}

/// What a causal query sees is split, so the first query tiles have parts without a key, and with
/// more queries than keys some tiles have no key at all.
#[rstest]
#[case::more_queries(200, 70)]
#[case::more_keys(70, 400)]
#[case::square(257, 257)]
fn causal_parts(
    #[case] seqlen_q: usize,
    #[case] seqlen_k: usize,
    #[values(2, 7)] splits: usize,
    #[values(F32, F16, Bf16)] dtype: Dtype,
) {
    let problem = Problem::random(dtype, dims(2, 2, seqlen_q, seqlen_k, 40)).causal();
    check(&problem, splits);
}

/// Bottom-right alignment by the index trick: each key counts once.
#[rstest]
fn every_key_counts_once(
    #[values((1, 700), (65, 300), (130, 90))] lengths: (usize, usize),
    #[values(2, 3, 4, 9)] splits: usize,
) {
    let problem = Problem::index_trick(F32, dims(1, 1, lengths.0, lengths.1, 8)).causal();
    let Some(Got { out, lse, .. }) = check(&problem, splits) else {
        return;
    };
    for (row, lse) in lse.expect("it is given").into_iter().enumerate() {
        let seen = (row + 1 + lengths.1).saturating_sub(lengths.0);
        let mean = seen.saturating_sub(1) as f64 / 2.0;
        let error = (out[row * 8] - mean).abs();
        assert!(error < 0.01, "row {row} gives {}, not {mean}", out[row * 8]);
        let ln = (seen as f64).ln();
        assert!(lse == ln || (lse - ln).abs() < 1e-4, "row {row}: {lse}");
    }
}

/// Masks that leave parts of the keys, or all of them, to nobody.
#[rstest]
#[case::scattered([2, 2, 9, 300], |[b, h, i, j]: [usize; 4]| (b + 3 * h + 5 * i + 7 * j) % 3 != 0)]
#[case::padding([2, 1, 1, 300], |[b, _, _, j]: [usize; 4]| j >= 40 + 200 * b)]
#[case::first_keys([1, 1, 1, 300], |[.., j]: [usize; 4]| j < 260)]
#[case::rows([1, 1, 9, 1], |[_, _, i, _]: [usize; 4]| i % 2 == 0)]
#[case::heads([1, 2, 1, 1], |[_, h, ..]: [usize; 4]| h == 1)]
fn masks_that_empty_parts(
    #[case] shape: [usize; 4],
    #[case] drop: fn([usize; 4]) -> bool,
    #[values(2, 7)] splits: usize,
    #[values((F32, Full), (F16, Causal), (Bf16, Full))] kind: (Dtype, Causality),
) {
    let problem = Problem::random(kind.0, dims(2, 2, 9, 300, 64));
    check(&problem.causality(kind.1).mask(shape, drop), splits);
}

/// A NaN that is masked stays in a part of its own, and out of the result.
#[rstest]
fn masked_nan_keys(#[values(5, 70)] seqlen_q: usize, #[values(F32, F16)] dtype: Dtype) {
    let mut problem = Problem::random(dtype, dims(1, 1, seqlen_q, 300, 64));
    problem = problem.mask([1, 1, 1, 300], |[.., j]| j >= 150);
    let clean = problem.clone();
    problem.k[150 * 64..].fill(f64::NAN);
    let Some(client) = client_for(&clean) else {
        return;
    };
    for plan in plans(&client, &question(&clean), 4) {
        let results = [&problem, &clean].map(|it| run(&client, it, &plan, Layout::Packed));
        assert!(results[0] == results[1], "{plan:?}");
    }
    check(&clean, 4);
}

/// Query heads that share keys, other head sizes, values of another length, rows that are apart.
#[rstest]
#[case::groups(dims(2, 6, 5, 300, 64).kv_heads(2), Layout::Packed)]
#[case::groups_by_token(dims(2, 6, 5, 300, 64).kv_heads(2), Layout::ByToken)]
#[case::odd(dims(1, 2, 20, 300, 59).val_dim(7), Layout::Packed)]
#[case::longer_values(dims(1, 2, 20, 300, 16).val_dim(100), Layout::ByToken)]
#[case::large(dims(1, 2, 3, 300, 256), Layout::ByToken)]
#[case::tiles(dims(2, 4, 150, 300, 64).kv_heads(2), Layout::ByToken)]
fn heads_and_layouts(
    #[case] dims: Dims,
    #[case] layout: Layout,
    #[values((F32, Causal), (Tf32, Full), (F16, Full), (Bf16, Causal))] kind: (Dtype, Causality),
) {
    let problem = Problem::random(kind.0, dims).causality(kind.1);
    check_in(&problem, 3, layout);
}

/// Logits of -72 407: the parts' sums are as exact as within one, since maxima are subtracted, not
/// logarithms.
#[rstest]
fn large_logits(#[values(3, 70)] seqlen_q: usize, #[values(F32, F16, Bf16)] dtype: Dtype) {
    let dims = dims(1, 1, seqlen_q, 290, 128);
    let fill = |shape: [usize; 4], x| vec![x; shape.iter().product()];
    let values = Host::from_fn(dims.v(), |[_, _, j, _]| [1.0, 3.0][j / 145]).data;
    let problem = Problem::new(
        dtype,
        dims,
        fill(dims.q(), 80.0),
        fill(dims.k(), -80.0),
        values,
    );
    let Some(Got { out, .. }) = check(&problem, 4) else {
        return;
    };
    assert!(out.iter().all(|x| *x == 2.0), "{:?}", &out[..4]);
}

/// A scale that is not folded into the exponent.
#[rstest]
fn scales(#[values(-0.5, 0.0, 3.0)] scale: f64) {
    let problem = Problem::random(F32, dims(1, 2, 17, 300, 64)).scale(scale);
    check(&problem, 3);
}

#[rstest]
fn nothing_to_attend(#[values(Full, Causal)] causality: Causality) {
    let problem = Problem::random(F32, dims(1, 2, 5, 0, 64)).causality(causality);
    let Some(Got { out, lse, .. }) = check(&problem, 3) else {
        return;
    };
    assert_eq!(out, vec![0.0; 2 * 5 * 64]);
    assert_eq!(lse, Some(vec![f64::NEG_INFINITY; 2 * 5]));
}

#[rstest]
fn bits_are_equal_from_run_to_run(#[values(F32, F16)] dtype: Dtype) {
    let problem = Problem::random(dtype, dims(1, 3, 40, 500, 64)).causal();
    let Some(client) = client_for(&problem) else {
        return;
    };
    for plan in plans(&client, &question(&problem), 6) {
        let first = run(&client, &problem, &plan, Layout::Packed);
        for _ in 0..5 {
            assert!(run(&client, &problem, &plan, Layout::Packed) == first);
        }
    }
}
