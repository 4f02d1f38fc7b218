//! One attention problem: inputs on the host, the same inputs on the device, the right answer.

use burn::tensor::{Device, Tensor};
use burn_flash_attention::{
    AttentionPath, AttentionReport, FlashOptions, FlashOutput, Precision, try_flash_attention,
};
use flash_reference::rng::Rng;
use flash_reference::rounding::{Dtype, forward_plain, round_all};
use flash_reference::{Causality, Inputs, Output, Spec, forward};

use crate::compare::{assert_within, is_yardstick, limit};
use crate::runtime;
use crate::support::{Dims, Host, download, upload, upload_mask};

/// Inputs, options and dtype of one attention.
#[derive(Clone, Debug)]
pub struct Problem {
    pub dtype: Dtype,
    pub spec: Spec,
    pub dims: Dims,
    /// Rounded to what tensors of `dtype` hold, as are `k`, `v` and the bias.
    pub q: Vec<f64>,
    pub k: Vec<f64>,
    pub v: Vec<f64>,
    pub mask: Option<Host<bool>>,
    pub bias: Option<Host<f64>>,
}

/// What the device gave.
pub struct Got {
    pub out: Vec<f64>,
    pub lse: Option<Vec<f64>>,
    pub report: AttentionReport,
}

/// q, k and v on a device.
#[derive(Clone, Debug)]
pub struct Qkv {
    pub q: Tensor<4>,
    pub k: Tensor<4>,
    pub v: Tensor<4>,
}

impl Problem {
    /// Standard normal q, k and v: logits are of standard deviation 1 whatever the head size.
    pub fn random(dtype: Dtype, dims: Dims) -> Self {
        let shapes = [dims.q(), dims.k(), dims.v()];
        let seed = shapes.as_flattened().iter().fold(17, |seed: u64, &size| {
            seed.wrapping_mul(1_000_003).wrapping_add(size as u64)
        });
        let mut rng = Rng::new(seed);
        let [q, k, v] = shapes.map(|shape| rng.normals(shape.iter().product()));
        Self::new(dtype, dims, q, k, v)
    }

    /// Given values, rounded to what tensors of `dtype` hold, the scale of the dimension and no option.
    pub fn new(dtype: Dtype, dims: Dims, q: Vec<f64>, k: Vec<f64>, v: Vec<f64>) -> Self {
        let spec = Spec {
            batch: dims.batch,
            num_heads: dims.num_heads,
            num_kv_heads: dims.num_kv_heads,
            seqlen_q: dims.seqlen_q,
            seqlen_k: dims.seqlen_k,
            head_dim: dims.head_dim,
            val_dim: dims.val_dim,
            scale: 1.0 / (dims.head_dim as f64).sqrt(),
            softcap: None,
            causality: Causality::Full,
        };
        let [q, k, v] = [q, k, v].map(|values| round_all(dtype.stored(), &values));
        Self {
            dtype,
            spec,
            dims,
            q,
            k,
            v,
            mask: None,
            bias: None,
        }
    }

    /// The index trick: zero queries and keys, and `V[j] = j`, so each output is the mean index of
    /// the keys that it sees.
    pub fn index_trick(dtype: Dtype, dims: Dims) -> Self {
        let [q, k] = [dims.q(), dims.k()].map(|shape| vec![0.0; shape.iter().product()]);
        let v = Host::from_fn(dims.v(), |[_, _, j, _]| j as f64).data;
        Self::new(dtype, dims, q, k, v)
    }

    pub fn causal(self) -> Self {
        self.causality(Causality::Causal)
    }

    pub fn causality(mut self, causality: Causality) -> Self {
        self.spec.causality = causality;
        self
    }

    /// Sets a scale other than the default one.
    pub fn scale(mut self, scale: f64) -> Self {
        self.spec.scale = scale;
        self
    }

    pub fn softcap(mut self, softcap: f64) -> Self {
        self.spec.softcap = Some(softcap);
        self
    }

    /// Drops the keys where `drop` holds; `shape` broadcasts to the scores.
    pub fn mask(mut self, shape: [usize; 4], drop: impl FnMut([usize; 4]) -> bool) -> Self {
        self.mask = Some(Host::from_fn(shape, drop));
        self
    }

    /// Drops each element of a mask of `shape` with probability `p`.
    pub fn random_mask(self, shape: [usize; 4], p: f64) -> Self {
        let mut rng = Rng::new(shape.iter().fold(5, |seed, &size| seed * 131 + size as u64));
        self.mask(shape, |_| rng.uniform() < p)
    }

    /// Adds normal values of `shape`, which broadcasts to the scores.
    pub fn random_bias(mut self, shape: [usize; 4]) -> Self {
        let mut rng = Rng::new(shape.iter().fold(6, |seed, &size| seed * 137 + size as u64));
        let data = round_all(self.dtype.stored(), &rng.normals(shape.iter().product()));
        self.bias = Some(Host { shape, data });
        self
    }

    /// Runs `f` on the inputs with mask and bias broadcast, as the specification takes them.
    pub fn with_inputs<R>(&self, f: impl FnOnce(&Spec, &Inputs) -> R) -> R {
        let scores = self.dims.scores();
        let mask = self.mask.as_ref().map(|mask| mask.broadcast(scores));
        let bias = self.bias.as_ref().map(|bias| bias.broadcast(scores));
        let inputs = Inputs {
            q: &self.q,
            k: &self.k,
            v: &self.v,
            mask: mask.as_deref(),
            bias: bias.as_deref(),
        };
        f(&self.spec, &inputs)
    }

    /// The specification's answer.
    pub fn want(&self) -> Output {
        self.with_inputs(forward)
    }

    /// The plain computation in `dtype`.
    pub fn plain(&self, dtype: Dtype) -> Output {
        self.with_inputs(|spec, inputs| forward_plain(dtype, spec, inputs))
    }

    /// Packed q, k and v on `device`.
    pub fn qkv(&self, device: &Device) -> Qkv {
        let upload = |shape, data| upload(self.dtype, shape, data, device);
        Qkv {
            q: upload(self.dims.q(), &self.q),
            k: upload(self.dims.k(), &self.k),
            v: upload(self.dims.v(), &self.v),
        }
    }

    /// The options, with mask and bias in the shapes that they were given in; asks for the LSE, and for
    /// products in tf32 if that is the dtype.
    pub fn options(&self, device: &Device) -> FlashOptions {
        let mut options = FlashOptions::new().with_lse();
        if self.spec.causality == Causality::Causal {
            options = options.causal();
        }
        if self.spec.scale != 1.0 / (self.dims.head_dim as f64).sqrt() {
            options = options.with_scale(self.spec.scale);
        }
        if let Some(softcap) = self.spec.softcap {
            options = options.with_softcap(softcap);
        }
        if self.dtype == Dtype::Tf32 {
            options = options.with_precision(Precision::Tf32);
        }
        if let Some(mask) = &self.mask {
            options = options.with_mask(upload_mask(mask, device));
        }
        if let Some(bias) = &self.bias {
            options = options.with_bias(upload(self.dtype, bias.shape, &bias.data, device));
        }
        options
    }

    /// Whether the device cannot hold the dtype, in which case attention must refuse it by name.
    #[track_caller]
    pub fn is_refused(&self) -> bool {
        if runtime::supports(self.dtype) {
            return false;
        }
        let device = runtime::device();
        let Qkv { q, k, v } = self.qkv(&device);
        let Err(error) = try_flash_attention(q, k, v, self.options(&device)) else {
            panic!("the device has no {:?}, yet attention took it", self.dtype);
        };
        let name = format!("{:?}", self.dtype).to_lowercase();
        let message = error.to_string();
        assert!(message.to_lowercase().contains(&name), "{message}");
        true
    }

    /// Runs packed inputs and asserts the rule; on a device without the dtype, the refusal.
    #[track_caller]
    pub fn check(&self) {
        if !self.is_refused() {
            self.check_output(self.run());
        }
    }

    /// Runs packed inputs on the device under test.
    #[track_caller]
    pub fn run(&self) -> FlashOutput {
        let device = runtime::device();
        self.run_tensors(self.qkv(&device), self.options(&device))
    }

    /// Runs attention on tensors that hold this problem's values in any layout.
    #[track_caller]
    pub fn run_tensors(&self, qkv: Qkv, options: FlashOptions) -> FlashOutput {
        let Qkv { q, k, v } = qkv;
        try_flash_attention(q, k, v, options)
            .unwrap_or_else(|error| panic!("{error}\n  {}", self.describe()))
    }

    /// Runs attention on tensors in any layout and asserts the rule on output and LSE.
    #[track_caller]
    pub fn check_tensors(&self, qkv: Qkv, options: FlashOptions) -> Got {
        self.check_output(self.run_tensors(qkv, options))
    }

    /// Asserts the rule on output and, if it is there, on the LSE.
    #[track_caller]
    pub fn check_output(&self, output: FlashOutput) -> Got {
        let want = self.want();
        let FlashOutput { out, lse, report } = output;
        assert_eq!(out.dims(), self.dims.out(), "shape of the output");
        let out = download(self.dtype, out);
        let what = format!("output ({})", self.describe());
        let precision = self.precision(&report);
        let plain = match precision == self.dtype {
            true => self.yardstick(&want),
            false => self.plain(precision),
        };
        let allowed = limit(precision, &want.out, &plain.out);
        assert_within(&what, &self.dims.out(), &out, &want.out, allowed);
        self.assert_empty_rows_are_zero(&out, &want);
        let lse = lse.map(|lse| {
            assert_eq!(lse.dims(), self.dims.lse(), "shape of the lse");
            let lse = download(Dtype::F32, lse);
            self.check_lse(&lse, &want, &report);
            lse
        });
        Got { out, lse, report }
    }

    /// The dtype whose rounding a result may have: the inputs', or tf32 where a kernel says so, except
    /// for what Burn's own matmul computed on tensor cores, which round f32 to tf32, with the mantissa
    /// of f16.
    fn precision(&self, report: &AttentionReport) -> Dtype {
        let stored = self.dtype.stored();
        let composed = report.path == AttentionPath::Composed;
        if stored == Dtype::F32 && composed && runtime::multiplies_in_tf32() {
            return Dtype::F16;
        }
        match report.precision {
            Some(Precision::Tf32) => self.dtype,
            Some(Precision::Full) | None => stored,
        }
    }

    /// A kernel's LSE is as exact as f32 whatever the inputs' dtype, since the scores never leave
    /// f32, unless it rounds queries and keys; a composed one has the scores' dtype.
    #[track_caller]
    fn check_lse(&self, lse: &[f64], want: &Output, report: &AttentionReport) {
        let dtype = match report.path {
            AttentionPath::Kernel(_) if self.precision(report) != Dtype::Tf32 => Dtype::F32,
            AttentionPath::Kernel(_) | AttentionPath::Composed => self.precision(report),
        };
        let plain = match dtype == self.dtype && dtype != Dtype::F32 {
            true => self.yardstick(want),
            false => self.plain(dtype),
        };
        let allowed = limit(dtype, &want.lse, &plain.lse);
        let what = format!("lse ({})", self.describe());
        assert_within(&what, &self.dims.lse(), lse, &want.lse, allowed);
    }

    /// The plain computation; where that leaves the range of its dtype, the plain f32 one rounded
    /// at the end, since a result that is wrong by itself would allow anything.
    fn yardstick(&self, want: &Output) -> Output {
        let plain = self.plain(self.dtype);
        if is_yardstick(&want.out, &plain.out) && is_yardstick(&want.lse, &plain.lse) {
            return plain;
        }
        let Output { out, lse } = self.plain(Dtype::F32);
        Output {
            out: round_all(self.dtype, &out),
            lse,
        }
    }

    /// A row without a key is zero exactly, not just within the limit.
    #[track_caller]
    fn assert_empty_rows_are_zero(&self, out: &[f64], want: &Output) {
        if self.dims.val_dim == 0 {
            return;
        }
        for (row, lse) in out.chunks(self.dims.val_dim).zip(&want.lse) {
            if *lse == f64::NEG_INFINITY {
                let zero = row.iter().all(|&x| x == 0.0);
                assert!(
                    zero,
                    "a row that sees nothing gives {row:?} ({})",
                    self.describe()
                );
            }
        }
    }

    /// The problem of one batch entry and head, for problems too large to compute whole. Only for
    /// problems without mask, bias and head groups.
    pub fn head(&self, batch: usize, head: usize) -> Self {
        let dims = self.dims;
        assert!(self.mask.is_none() && self.bias.is_none());
        assert_eq!(dims.num_heads, dims.num_kv_heads);
        let index = batch * dims.num_heads + head;
        let part = |values: &[f64], size: usize| values[index * size..][..size].to_vec();
        let one = Dims {
            batch: 1,
            num_heads: 1,
            num_kv_heads: 1,
            ..dims
        };
        let mut problem = self.clone();
        problem.q = part(&self.q, dims.seqlen_q * dims.head_dim);
        problem.k = part(&self.k, dims.seqlen_k * dims.head_dim);
        problem.v = part(&self.v, dims.seqlen_k * dims.val_dim);
        problem.dims = one;
        problem.spec = Spec {
            batch: 1,
            num_heads: 1,
            num_kv_heads: 1,
            ..problem.spec
        };
        problem
    }

    /// What a failure needs to say.
    pub fn describe(&self) -> String {
        let mask = self.mask.as_ref().map(|mask| mask.shape);
        let bias = self.bias.as_ref().map(|bias| bias.shape);
        let Self { dtype, spec, .. } = self;
        format!("{dtype:?}, {spec:?}, mask {mask:?}, bias {bias:?}")
    }
}
