//! Each verb of `MatrixUnit` by itself, on every unit that the runtime has.
//!
//! Small integers: every product and sum is exact in every element type, so equality is asked for.

use cubecl::{client::Client, prelude::*};
use flash_kernels::{
    AttentionProblem, AttentionShape, Causality, DeviceClass, FloatKind, Masking, Pass, Plan,
    Precision, TensorView, UnitKind,
    kernel::{
        owned::Owned,
        pipeline::Pipeline,
        rows::Rows,
        unit::{self, Cmma, HalfFloat, MatrixUnit, Mma, Right, Tf32},
    },
    select::{Alignment, select, widest},
};
use flash_reference::rounding::{Dtype, round_all};
use half::{bf16, f16};
use rstest::rstest;

use crate::runtime;

/// Shows what the verbs do with `a` `[block_m, head]`, `b` `[block_n, head]`, `c` `[block_n, val]`:
/// `s = a·bᵀ`, the maximum and sum of its rows, `s·c`, and `s·c` with row `r` times `r + 1`.
#[cube(launch_unchecked)]
fn verbs<U: MatrixUnit, L: Numeric, W: Size>(
    a: &Tensor<Vector<L, W>>,
    b: &Tensor<Vector<L, W>>,
    c: &Tensor<Vector<L, W>>,
    s_out: &mut [f32],
    rows_out: &mut [f32],
    acc_out: &mut [f32],
    scaled_out: &mut [f32],
    #[comptime] plan: Plan,
) {
    let (head_pad, val_pad) = comptime!((plan.tile.head_pad, plan.tile.val_pad));
    let block_n = comptime!(plan.tile.block_n);
    let rows = Rows::of(a, 0usize, 0usize);
    let mut scratch = U::scratch(plan);
    let owned = Owned::<U>::new(rows, 0u32, head_pad, plan);
    let place = owned.place();
    let mut walk = Pipeline::<U>::new(
        &place,
        Rows::of(b, 0usize, 0usize),
        Rows::of(c, 0usize, 0usize),
        head_pad,
        val_pad,
        plan,
    );
    let left = walk.start_behind(&owned, a, b, c, 0u32, plan);
    let right = walk.first(b, c, 0u32, 1u32, plan);
    let s = U::product(&left, &right, &mut scratch, head_pad, plan);
    let frag_rows = U::frag_rows(plan);
    let cols = U::cols(&s);
    let mut peak = Array::<f32>::new(frag_rows);
    let mut total = Array::<f32>::new(frag_rows);
    let mut factor = Array::<f32>::new(frag_rows);
    #[unroll]
    for r in 0..frag_rows {
        let row = U::row(&s, r, plan);
        peak[r] = U::get(&s, r, 0usize);
        total[r] = f32::new(0.0);
        factor[r] = f32::cast_from(row + 1u32);
        #[unroll]
        for c in 0..cols {
            let x = U::get(&s, r, c);
            peak[r] = max(peak[r], x);
            total[r] += x;
            s_out[row as usize * block_n + U::col(&s, c, plan) as usize] = x;
        }
    }
    U::reduce_max(&mut peak, &mut scratch, plan);
    U::reduce_sum(&mut total, &mut scratch, plan);
    #[unroll]
    for r in 0..frag_rows {
        // Every unit of a row has the result: the one with the last column shows it.
        if U::col(&s, comptime!(cols - 1), plan) as usize == comptime!(block_n - 1) {
            let row = U::row(&s, r, plan) as usize;
            rows_out[2 * row] = peak[r];
            rows_out[2 * row + 1] = total[r];
        }
    }
    let held = U::hold(&s, &mut scratch, plan);
    let values = walk.second(c, 0u32, plan);
    let mut acc = U::zero(val_pad, plan);
    U::accumulate(&mut acc, &held, &values, &mut scratch, Right::Given, plan);
    show::<U>(&acc, acc_out, &mut scratch, plan);
    U::rescale(&mut acc, &factor, true.runtime(), &mut scratch, plan);
    show::<U>(&acc, scaled_out, &mut scratch, plan);
}

#[cube]
fn show<U: MatrixUnit>(
    acc: &U::Acc,
    out: &mut [f32],
    scratch: &mut U::Scratch,
    #[comptime] plan: Plan,
) {
    let val_pad = comptime!(plan.tile.val_pad);
    let part_cols = U::part_cols(val_pad, plan);
    #[unroll]
    for part in 0..comptime!(val_pad / part_cols) {
        let frag = U::read(acc, scratch, part, val_pad, plan);
        let cols = U::cols(&frag);
        #[unroll]
        for r in 0..U::rows(&frag) {
            let row = U::row(&frag, r, plan) as usize;
            #[unroll]
            for c in 0..cols {
                let col = U::col(&frag, c, plan) as usize + comptime!(part * part_cols);
                out[row * val_pad + col] = U::get(&frag, r, c);
            }
        }
    }
}

/// What a product becomes as an operand: nothing of these integers needs more bits than tf32 has.
fn reference(dtype: FloatKind) -> Dtype {
    match dtype {
        FloatKind::F32 => Dtype::F32,
        FloatKind::F16 => Dtype::F16,
        FloatKind::Bf16 => Dtype::Bf16,
    }
}

/// Small integers in a pattern without symmetry.
fn integers(rows: usize, cols: usize, seed: usize) -> Vec<f64> {
    let element = |i: usize| ((i * 7 + i / cols * 3 + seed) % 5) as f64 - 2.0;
    (0..rows * cols).map(element).collect()
}

fn upload(client: &Client, values: &[f64], dtype: FloatKind, shape: [usize; 4]) -> TensorView {
    let bytes: Vec<u8> = match dtype {
        FloatKind::F32 => bytes_of(values, |x| (x as f32).to_le_bytes()),
        FloatKind::F16 => bytes_of(values, |x| f16::from_f64(x).to_le_bytes()),
        FloatKind::Bf16 => bytes_of(values, |x| bf16::from_f64(x).to_le_bytes()),
    };
    TensorView::packed(client.create_from_slice(&bytes), shape)
}

fn bytes_of<const N: usize>(values: &[f64], encode: impl Fn(f64) -> [u8; N]) -> Vec<u8> {
    values.iter().flat_map(|&x| encode(x)).collect()
}

fn tensor(view: &TensorView) -> TensorArg {
    // SAFETY: shape and strides are those with which the buffer was made.
    unsafe {
        TensorArg::from_raw_parts(view.handle.clone(), view.strides.into(), view.shape.into())
    }
}

struct Shown {
    s: Vec<f32>,
    rows: Vec<f32>,
    acc: Vec<f32>,
    scaled: Vec<f32>,
}

/// `Cmma` by what global memory is read as.
fn cmma<E: HalfFloat>(client: &Client, plan: &Plan, inputs: [&TensorView; 3]) -> Shown {
    if plan.loads_words() {
        run::<Cmma<E>, u32>(client, plan, inputs)
    } else {
        run::<Cmma<E>, E>(client, plan, inputs)
    }
}

fn run<U: MatrixUnit, L: Numeric>(client: &Client, plan: &Plan, inputs: [&TensorView; 3]) -> Shown {
    let tile = &plan.tile;
    let lens = [
        tile.block_m * tile.block_n,
        2 * tile.block_m,
        tile.block_m * tile.val_pad,
        tile.block_m * tile.val_pad,
    ];
    // A value that no verb produces, so that what is not written is found.
    let poison = |len: usize| {
        vec![f32::NAN; len]
            .iter()
            .flat_map(|x| x.to_le_bytes())
            .collect()
    };
    let handles = lens.map(|len| client.create_from_slice(&poison(len) as &Vec<u8>));
    let [a, b, c] = inputs.map(tensor);
    let mut outputs = handles.iter().zip(lens).map(|(handle, len)| {
        // SAFETY: the buffer has `len` elements.
        unsafe { BufferArg::from_raw_parts(handle.clone(), len) }
    });
    let mut output = || outputs.next().expect("one of four");
    // SAFETY: the kernel writes inside the tile that the buffers are as large as.
    unsafe {
        verbs::launch_unchecked::<U, L>(
            client,
            CubeCount::Static(1, 1, 1),
            CubeDim::new_1d(plan.threads as u32),
            plan.load_components(),
            a,
            b,
            c,
            output(),
            output(),
            output(),
            output(),
            *plan,
        );
    }
    let [s, rows, acc, scaled] = handles.map(|handle| {
        let bytes = client.read_one(handle).expect("the launch succeeded");
        let words = bytes.chunks_exact(4);
        words
            .map(|x| f32::from_le_bytes([x[0], x[1], x[2], x[3]]))
            .collect()
    });
    Shown {
        s,
        rows,
        acc,
        scaled,
    }
}

/// The unit of `plan` as a type.
fn by_unit(client: &Client, plan: &Plan, dtype: FloatKind, views: [&TensorView; 3]) -> Shown {
    match (plan.unit, dtype) {
        (UnitKind::Scalar, FloatKind::F32) => run::<unit::Scalar, f32>(client, plan, views),
        (UnitKind::Scalar, FloatKind::F16) => run::<unit::Scalar, f16>(client, plan, views),
        (UnitKind::Scalar, FloatKind::Bf16) => run::<unit::Scalar, bf16>(client, plan, views),
        (UnitKind::Cmma, FloatKind::F16) => cmma::<f16>(client, plan, views),
        (UnitKind::Mma, FloatKind::F32) => run::<Mma<Tf32>, f32>(client, plan, views),
        (UnitKind::Mma, FloatKind::F16) => run::<Mma<f16>, f16>(client, plan, views),
        (UnitKind::Cmma, FloatKind::Bf16) => cmma::<bf16>(client, plan, views),
        (UnitKind::Mma, FloatKind::Bf16) => run::<Mma<bf16>, bf16>(client, plan, views),
        (unit, dtype) => panic!("{unit:?} was selected for {dtype:?}"),
    }
}

fn product(
    a: &[f64],
    b: &[f64],
    [m, n, k]: [usize; 3],
    b_at: impl Fn(usize, usize) -> usize,
) -> Vec<f64> {
    let dot = |i: usize, j: usize| (0..k).map(|l| a[i * k + l] * b[b_at(l, j)]).sum();
    (0..m * n).map(|i| dot(i / n, i % n)).collect()
}

fn exact(values: &[f64]) -> Vec<f32> {
    values.iter().map(|&x| x as f32).collect()
}

/// Columns past `dim` of rows `pad` long are padding; the verbs leave zeros there.
fn padded(values: &[f64], dim: usize, pad: usize) -> Vec<f32> {
    let rows = values.chunks(dim);
    rows.flat_map(|row| {
        let zeros = std::iter::repeat_n(0.0, pad - dim);
        row.iter().map(|&x| x as f32).chain(zeros)
    })
    .collect()
}

#[rstest]
#[case::square(64, 64)]
#[case::wide(128, 128)]
#[case::uneven(40, 24)]
#[case::odd(59, 7)]
fn verbs_are_exact_on_integers(
    #[case] head_dim: usize,
    #[case] val_dim: usize,
    #[values(
        (FloatKind::F32, Precision::Full),
        (FloatKind::F32, Precision::Tf32),
        (FloatKind::F16, Precision::Full),
        (FloatKind::Bf16, Precision::Full)
    )]
    kind: (FloatKind, Precision),
) {
    let (dtype, precision) = kind;
    let Some(client) = runtime::client() else {
        assert_eq!(runtime::current(), runtime::Runtime::Flex);
        return;
    };
    // The overlapped kernel has no verbs of its own: a warpgroup's products are seen as `Mma`'s.
    let device = DeviceClass {
        wgmma: false,
        ..DeviceClass::of(&client)
    };
    let shape = |rows, dim| [1, 1, rows, dim];
    let problem = AttentionProblem {
        shape: AttentionShape::new(shape(1, head_dim), shape(1, head_dim), shape(1, val_dim))
            .expect("they agree"),
        dtype,
        causality: Causality::Full,
        masking: Masking::None,
        scale: 1.0,
        precision,
    };
    let align = Alignment(widest(head_dim, 8).min(widest(val_dim, 8)));
    let Ok(plan) = select(&device, &problem, Pass::Forward, align) else {
        assert!(dtype != FloatKind::F32, "every device has f32");
        assert!(
            !(dtype == FloatKind::F16 && device.f16 || device.bf16),
            "{device:?}"
        );
        return;
    };
    let (m, n) = (plan.tile.block_m, plan.tile.block_n);
    let a = integers(m, head_dim, 1);
    let b = integers(n, head_dim, 2);
    let c = integers(n, val_dim, 3);
    let views = [
        upload(&client, &a, dtype, shape(m, head_dim)),
        upload(&client, &b, dtype, shape(n, head_dim)),
        upload(&client, &c, dtype, shape(n, val_dim)),
    ];
    let views = [&views[0], &views[1], &views[2]];
    let shown = by_unit(&client, &plan, dtype, views);
    let s = product(&a, &b, [m, n, head_dim], |l, j| j * head_dim + l);
    assert_eq!(shown.s, exact(&s), "product");
    let rows: Vec<f32> = s
        .chunks(n)
        .flat_map(|row| {
            [
                row.iter().copied().fold(f64::MIN, f64::max),
                row.iter().sum(),
            ]
        })
        .map(|x| x as f32)
        .collect();
    assert_eq!(shown.rows, rows, "reduce_max and reduce_sum");
    // A product becomes an operand in the elements' type.
    let held = round_all(reference(dtype), &s);
    let acc = product(&held, &c, [m, val_dim, n], |l, j| l * val_dim + j);
    let pad = plan.tile.val_pad;
    assert_eq!(shown.acc, padded(&acc, val_dim, pad), "hold and accumulate");
    let scaled: Vec<f64> = acc
        .iter()
        .enumerate()
        .map(|(i, x)| x * (i / val_dim + 1) as f64)
        .collect();
    assert_eq!(shown.scaled, padded(&scaled, val_dim, pad), "rescale");
}
